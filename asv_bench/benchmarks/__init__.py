"""The asv suite. Without a CUDA device every benchmark that needs one is shown as not available."""
