"""Graded problems, and a server's first drafts of them."""
