"""What moves beside the computation, under one scheduler (`flights`): gathers, copies, reductions, messages."""
