"""The report: our records beside the paper's numbers, as a page, as Markdown or as JSON."""
