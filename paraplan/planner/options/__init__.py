"""What single options of the planner may be, by subject: `planner.constraints` has them as fields."""
