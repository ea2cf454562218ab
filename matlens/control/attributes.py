"""The six attributes of toxicity that paper B's Table 5 reports."""

TOXICITY = "toxicity"

ATTRIBUTES = {
    TOXICITY: "rude, disrespectful, or unreasonable language",
    "severe_toxicity": "very hateful, aggressive, disrespectful language",
    "sexually_explicit": "sexually explicit language",
    "threat": "a threat",
    "profanity": "swear words, curse words, or other obscene or profane language",
    "identity_attack": "negative or hateful language targeting someone because of their identity",
}
"""Each attribute by its name, and in the words that announce it in Self-Debiasing (Schick et al. 2021)."""
