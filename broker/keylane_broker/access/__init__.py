"""Who may do what: tokens, what they allow, and how they are looked up."""
