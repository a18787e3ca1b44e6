//! Lists of names in messages.

/// The first `limit` names, and the number of the others.
pub(super) fn join_first<'a>(limit: usize, names: impl ExactSizeIterator<Item = &'a str>) -> String {
    let more = names.len().saturating_sub(limit);
    let first = names.take(limit).collect::<Vec<_>>().join(", ");
    match more {
        0 => first,
        more => format!("{first} and {more} more"),
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
