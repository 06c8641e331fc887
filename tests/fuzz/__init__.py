"""Random models, batches and plans, sound and broken: a right result, or one error on all ranks."""
