"""Reports as files: pages, pictures."""
