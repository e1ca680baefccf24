"""Takes a rank's steps: instructions as functions of tensors, executor, observers, compiled blocks, CUDA graphs."""
