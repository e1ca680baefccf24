"""Pipeline schedules: who runs what when, as orders of computations that `complete` completes into schedules."""
