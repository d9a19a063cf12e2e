"""stub"""
def extract_answer(text, choices=False):
    import re
    m = re.findall(r"\\boxed\{([^{}]*)\}", text)
    return m[-1] if m else None

def normal_gold(v):
    return None if v is None else str(v)

def answers_equal(a, b):
    return a == b

def equivalence_classes(answers):
    ids = {}
    return [None if a is None else ids.setdefault(a, len(ids)) for a in answers]
