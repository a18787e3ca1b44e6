//! Whose credentials a plugin's are: kubelet's cache key of a service account.

use std::collections::BTreeMap;

use ring::digest::{Context, SHA256, SHA256_OUTPUT_LEN};

/// A hash of a service account and what a plugin gets of it: its annotations may have 256 KiB, and its token is a secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AccountKey([u8; SHA256_OUTPUT_LEN]);

impl AccountKey {
    /// The key of the account that these texts identify; the token only where credentials are not shared between
    /// tokens.
    pub fn new<const N: usize>(
        identity: [&str; N],
        annotations: &BTreeMap<String, String>,
        token: Option<&str>,
    ) -> Self {
        let mut hash = Context::new(&SHA256);
        let mut add = |text: &str| {
            // With its length, so that no other sequence of texts is hashed as the same bytes.
            hash.update(&text.len().to_be_bytes());
            hash.update(text.as_bytes());
        };
        identity.into_iter().for_each(&mut add);
        for (key, value) in annotations {
            add(key);
            add(value);
        }
        // Annotations come in pairs: this is none.
        if let Some(token) = token {
            add(token);
        }
        let mut bytes = [0; SHA256_OUTPUT_LEN];
        bytes.copy_from_slice(hash.finish().as_ref());
        Self(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_makes_a_difference() {
        let annotations = |entries: &[(&str, &str)]| -> BTreeMap<String, String> {
            let entries = entries.iter();
            entries
                .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
                .collect()
        };
        let (none, one) = (annotations(&[]), annotations(&[("a", "b")]));
        let keys = [
            AccountKey::new(["ns", "a", "uid"], &none, None),
            AccountKey::new(["ns", "a", "other"], &none, None),
            AccountKey::new(["ns", "au", "id"], &none, None),
            AccountKey::new(["nsa", "", "uid"], &none, None),
            AccountKey::new(["ns", "a", "uid"], &one, None),
            AccountKey::new(["ns", "a", "uid"], &annotations(&[("ab", "")]), None),
            AccountKey::new(["ns", "a", "uid"], &none, Some("token")),
            AccountKey::new(["ns", "a", "uid"], &none, Some("other")),
            AccountKey::new(["ns", "a", "uid"], &one, Some("token")),
        ];
        for (at, key) in keys.iter().enumerate() {
            assert_eq!(keys.iter().position(|other| other == key), Some(at));
        }
        assert_eq!(AccountKey::new(["ns", "a", "uid"], &one, None), keys[4]);
    }
}
