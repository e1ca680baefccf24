"""The shortest schedule found for given times, as a job shop: dispatch, tabu search, intervals, and a bound."""
