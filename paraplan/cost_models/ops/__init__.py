"""What an op does and how long a device takes: a roofline by op class, tiles in waves, fused chains."""
