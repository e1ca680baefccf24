"""This machine measured: its devices, links and local ops, as cluster and profile files."""
