"""What things cost, on machines measured or modelled: the face planners and the simulator see is `costs`.

No torch; planners, baselines, reports and jobs come in.
"""
