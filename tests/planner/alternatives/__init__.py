"""Other plans of a job."""
