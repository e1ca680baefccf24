"""Which programs, plans and schedules are legal: checked between passes and on every load."""
