//! Lists of names in messages.

/// The first `limit` names, and the number of the others.
#[must_use]
pub fn join_first<T: AsRef<str>>(limit: usize, names: impl ExactSizeIterator<Item = T>) -> String {
    let more = names.len().saturating_sub(limit);
    let mut text = String::new();
    for (at, name) in names.take(limit).enumerate() {
        if at > 0 {
            text.push_str(", ");
        }
        text.push_str(name.as_ref());
    }
    match more {
        0 => text,
        more => format!("{text} and {more} more"),
    }
}

#[cfg(test)]
mod tests {
    use super::join_first;

    #[test]
    fn names_beyond_the_limit_are_counted() {
        let joined = |names: &[&str]| join_first(2, names.iter().copied());
        assert_eq!(joined(&[]), "");
        assert_eq!(joined(&["a", "b"]), "a, b");
        assert_eq!(joined(&["a", "b", "c", "d"]), "a, b and 2 more");
    }
}
