"""What the cells of train_in_colab.ipynb call."""
