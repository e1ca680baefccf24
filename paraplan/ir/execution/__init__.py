"""What is executed: rank programs and the names of their values, schedules, meetings, memory actions.

Written by lowering, priced by cost models, executed by the runtime entry by entry; no torch.
"""
