"""What a gate run found, on the terminal, as a page, Markdown and JUnit XML."""
