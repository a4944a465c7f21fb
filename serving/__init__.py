"""What answers requests: OpenAI's API and the demo page, over one queue of generations."""
