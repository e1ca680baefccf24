"""The only door to the solvers: mixed-integer programs by MathOpt and PuLP, intervals by CP-SAT."""
