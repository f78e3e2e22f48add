"""Pointing other programs at a daemon: what each of them reads, and edits that can be undone."""
