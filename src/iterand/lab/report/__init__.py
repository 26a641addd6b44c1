"""The report: our records beside the paper's numbers, as an HTML page, as Markdown or as JSON."""
