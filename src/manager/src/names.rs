//! Lists of names in messages.

/// The first `limit` names, and how many there are besides.
pub(super) fn first_of<'a>(limit: usize, names: impl ExactSizeIterator<Item = &'a str>) -> String {
    let more = names.len().saturating_sub(limit);
    let first = names.take(limit).collect::<Vec<_>>().join(", ");
    match more {
        0 => first,
        more => format!("{first} and {more} more"),
    }
}

#[cfg(test)]
mod tests {
    use super::first_of;

    #[test]
    fn what_does_not_fit_is_counted() {
        let say = |names: &[&str]| first_of(2, names.iter().copied());
        assert_eq!(say(&[]), "");
        assert_eq!(say(&["a", "b"]), "a, b");
        assert_eq!(say(&["a", "b", "c", "d"]), "a, b and 2 more");
    }
}
