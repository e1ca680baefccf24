"""The steps of one rank around its blocks, part by part; the parts share one writer (`step_writer`)."""
