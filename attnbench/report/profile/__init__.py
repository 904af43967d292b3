"""What a profile, or the difference of two, shows: terminal, page, Markdown and figures."""
