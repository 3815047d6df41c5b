"""The third tier: pages of KV as bytes in a store that outlives the process. Knows no slots and no torch."""
