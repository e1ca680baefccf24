"""Pipeline schedules: who runs what when, as orders of computations that `transfers` completes into schedules."""
