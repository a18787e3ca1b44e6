//! Names of objects and namespaces, as the API server allows them. Other strings must not become part of a request: in
//! a path `?`, `#` and `/` have a special meaning.

/// The rule for a name of most kinds, in the API server's words.
pub const SUBDOMAIN: &str = "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', \
     and must start and end with an alphanumeric character";
/// The rule for the name of a namespace, in the API server's words.
pub const LABEL: &str = "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', \
     and must start and end with an alphanumeric character";

/// The same as [`is_subdomain`] for CRDs, whose patterns are regular expressions of Go.
pub const SUBDOMAIN_PATTERN: &str = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$";
/// The same for [`is_label`].
pub const LABEL_PATTERN: &str = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$";
/// Longest subdomain.
pub const MAX_SUBDOMAIN_LENGTH: usize = 253;
/// Longest label.
pub const MAX_LABEL_LENGTH: usize = 63;

/// Whether `text` is an RFC 1123 label, as names of namespaces are.
#[must_use]
pub fn is_label(text: &str) -> bool {
    text.len() <= MAX_LABEL_LENGTH && is_dns_label(text)
}

/// What is wrong with an RFC 1123 label, in as many parts as the API server reports.
#[must_use]
pub fn label_errors(text: &str) -> Vec<&'static str> {
    let mut errors = Vec::new();
    if !is_dns_label(text) {
        errors.push(LABEL);
    }
    if text.len() > MAX_LABEL_LENGTH {
        errors.push("must be no more than 63 bytes");
    }
    errors
}

/// Whether `text` is an RFC 1123 subdomain, as names of most objects are.
#[must_use]
pub fn is_subdomain(text: &str) -> bool {
    text.len() <= MAX_SUBDOMAIN_LENGTH && text.split('.').all(is_dns_label)
}

/// Lowercase letters and digits, and `-` between them; of any length, but not empty.
pub(crate) fn is_dns_label(text: &str) -> bool {
    let is_lower_alphanumeric = |c: &u8| c.is_ascii_lowercase() || c.is_ascii_digit();
    let text = text.as_bytes();
    text.first().is_some_and(is_lower_alphanumeric)
        && text.last().is_some_and(is_lower_alphanumeric)
        && text.iter().all(|c| is_lower_alphanumeric(c) || *c == b'-')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_rfc_1123_names_are_valid() {
        for name in ["a", "web-0", "a.b-c.d", "0", "10.0.0.1"] {
            assert!(is_subdomain(name), "{name}");
        }
        let long = "a".repeat(254);
        for text in [
            "", ".", "..", "../x", "a/b", "a?b=", "a#b", "%2e", "a b", "A", "-a", "a-", "a..b", "a.", "é",
            "a\n", "\0", &long,
        ] {
            assert!(!is_subdomain(text) && !is_label(text), "{text:?}");
        }
        assert!(is_label("kube-system") && !is_label("a.b") && !is_label(&"a".repeat(64)));
        for (text, count) in [("a-1", 0), ("a.b", 1), ("", 1)] {
            assert_eq!(label_errors(text).len(), count, "{text:?}");
        }
        assert_eq!(label_errors(&"a".repeat(64)).len(), 1);
        assert_eq!(label_errors(&"A".repeat(64)).len(), 2);
        assert!(is_subdomain(&"a".repeat(253)) && is_label(&"a".repeat(63)));
    }
}
