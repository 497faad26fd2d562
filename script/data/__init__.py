"""Fetching real text and models, and turning text into token files."""
