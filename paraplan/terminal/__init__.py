"""What the command shows people: tables, progress, faults."""
