"""Archives of topics as Parquet, and replaying them."""
