"""The canonical ops as torch.library ops: shapes, and forms that autograd differentiates."""
