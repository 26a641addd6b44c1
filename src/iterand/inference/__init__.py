"""Export of tickets for inference."""
