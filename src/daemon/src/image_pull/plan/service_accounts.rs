//! Which service accounts a tag is pulled with.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::ObjectReference;

use kruise_api::node_image::ServiceAccountReference;

/// Maximum number of service accounts in one attempt: plugins are called for each.
const MAX_ACCOUNTS: usize = 16;

/// The service accounts of one tag.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TagAccounts {
    /// In the order to use them.
    pub references: Vec<ServiceAccountReference>,
    /// Whether the jobs of a namespace have none, or there are no jobs.
    pub without_account: bool,
}

/// The service accounts that serve a tag: of the namespaces of the jobs that own it, since a NodeImage lists those of
/// all jobs that use the image. One of each namespace in turn, starting with `first_namespace`, so that no namespace has
/// to wait for all accounts of a different one.
pub fn tag_accounts(
    listed: &[ServiceAccountReference],
    owners: &[ObjectReference],
    first_namespace: &str,
) -> TagAccounts {
    let namespaces: BTreeSet<&str> = owners
        .iter()
        .map(|owner| owner.namespace.as_deref().unwrap_or_default())
        .collect();
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    let mut ranked = Vec::new();
    for account in listed {
        let namespace = account.namespace.as_str();
        if namespaces.contains(namespace) {
            let count = counts.entry(namespace).or_default();
            ranked.push((*count, namespace != first_namespace, account));
            *count += 1;
        }
    }
    ranked.sort_unstable();
    let references = ranked.into_iter().take(MAX_ACCOUNTS);
    TagAccounts {
        references: references.map(|(_, _, account)| account.clone()).collect(),
        without_account: namespaces.is_empty()
            || namespaces.iter().any(|namespace| !counts.contains_key(namespace)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn accounts(names: &[(&str, &str)]) -> Vec<ServiceAccountReference> {
        let account = |(namespace, name): &(&str, &str)| ServiceAccountReference {
            namespace: (*namespace).to_owned(),
            name: (*name).to_owned(),
        };
        names.iter().map(account).collect()
    }

    fn owners(namespaces: &[&str]) -> Vec<ObjectReference> {
        let owner = |namespace: &&str| ObjectReference {
            namespace: Some((*namespace).to_owned()),
            ..ObjectReference::default()
        };
        namespaces.iter().map(owner).collect()
    }

    #[test]
    fn namespaces_of_owners_take_turns() {
        let listed = accounts(&[("a", "1"), ("a", "2"), ("other", "1"), ("b", "1"), ("c", "1")]);
        let found = tag_accounts(&listed, &owners(&["a", "b", "c", "a"]), "b");
        let expected = accounts(&[("b", "1"), ("a", "1"), ("c", "1"), ("a", "2")]);
        assert_eq!((found.references, found.without_account), (expected, false));
        let found = tag_accounts(&listed, &owners(&["d", "c"]), "d");
        assert_eq!(
            (found.references, found.without_account),
            (accounts(&[("c", "1")]), true)
        );
        let none = tag_accounts(&listed, &[], "");
        assert_eq!((none.references, none.without_account), (Vec::new(), true));
    }

    #[test]
    fn number_is_bounded_and_the_first_namespace_is_served() {
        let names: Vec<String> = (0..100).map(|n| format!("n{n:02}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let listed: Vec<(&str, &str)> = names.iter().map(|name| (*name, "a")).collect();
        let found = tag_accounts(&accounts(&listed), &owners(&names), "n99").references;
        assert_eq!(found.len(), MAX_ACCOUNTS);
        assert_eq!(found.first(), accounts(&[("n99", "a")]).first());
    }
}
