"""The built-in quickstart corpus: true facts as questions and answers, and the questions held out of the training."""
