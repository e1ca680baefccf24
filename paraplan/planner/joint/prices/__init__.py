"""What the devices of a position take and hold under the shardings worth it, for every kind that a space asks for."""
