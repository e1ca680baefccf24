"""Kernels that ops run as on kinds of devices, as records, and how many launches each is (functions: `kernels.gpu`)."""
