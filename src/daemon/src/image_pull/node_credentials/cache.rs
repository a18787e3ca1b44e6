//! Credentials of plugins that are still valid, by kubelet's cache keys.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::account_key::AccountKey;
use super::response::{CacheScope, PluginCredentials};
use crate::image_pull::plan::keyring::Keyring;

/// Entries of one plugin; the ones that end first go first.
const MAX_ENTRIES: usize = 1000;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum CacheKey {
    Image(String),
    Registry(String),
    Global,
}

impl CacheKey {
    fn new(scope: CacheScope, repository: &str) -> Self {
        match scope {
            CacheScope::Image => Self::Image(repository.to_owned()),
            CacheScope::Registry => {
                Self::Registry(repository.split('/').next().unwrap_or_default().to_owned())
            }
            CacheScope::Global => Self::Global,
        }
    }
}

/// The credentials of one plugin, each also by the service account that it got a token of.
#[derive(Debug, Default)]
pub struct Cache {
    entries: HashMap<(CacheKey, Option<AccountKey>), (Keyring, Instant)>,
}

impl Cache {
    /// What is kept for a repository and a service account: of the repository, its registry, or all.
    pub fn get(&self, repository: &str, account: Option<AccountKey>, now: Instant) -> Option<&Keyring> {
        let scopes = [CacheScope::Image, CacheScope::Registry, CacheScope::Global];
        let mut keys = scopes.into_iter().map(|scope| CacheKey::new(scope, repository));
        keys.find_map(|key| {
            let (keyring, end) = self.entries.get(&(key, account))?;
            (now < *end).then_some(keyring)
        })
    }

    /// Keeps the credentials that the plugin returned for a repository and a service account.
    pub fn insert(
        &mut self,
        repository: &str,
        account: Option<AccountKey>,
        credentials: &PluginCredentials,
        now: Instant,
    ) {
        if credentials.keep == Duration::ZERO {
            return;
        }
        self.entries.retain(|_, (_, end)| now < *end);
        if self.entries.len() >= MAX_ENTRIES {
            let first = self.entries.iter().min_by_key(|(_, (_, end))| *end);
            if let Some(key) = first.map(|(key, _)| key.clone()) {
                self.entries.remove(&key);
            }
        }
        let key = (CacheKey::new(credentials.scope, repository), account);
        let entry = (credentials.keyring.clone(), now + credentials.keep);
        self.entries.insert(key, entry);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn credentials(scope: CacheScope, seconds: u64) -> PluginCredentials {
        PluginCredentials {
            keyring: Keyring::default(),
            scope,
            keep: Duration::from_secs(seconds),
        }
    }

    #[test]
    fn scope_and_time_decide_who_else_gets_credentials() {
        let now = Instant::now();
        for (scope, same_registry, other_registry) in [
            (CacheScope::Image, false, false),
            (CacheScope::Registry, true, false),
            (CacheScope::Global, true, true),
        ] {
            let mut cache = Cache::default();
            cache.insert("r.test/a", None, &credentials(scope, 10), now);
            let has = |repository: &str, seconds| {
                cache
                    .get(repository, None, now + Duration::from_secs(seconds))
                    .is_some()
            };
            assert!(has("r.test/a", 9) && !has("r.test/a", 10));
            assert_eq!(
                (has("r.test/b", 0), has("s.test/a", 0)),
                (same_registry, other_registry)
            );
        }
        let mut cache = Cache::default();
        cache.insert("r.test/a", None, &credentials(CacheScope::Global, 0), now);
        assert!(cache.get("r.test/a", None, now).is_none());
    }

    #[test]
    fn number_of_entries_is_bounded() {
        let now = Instant::now();
        let mut cache = Cache::default();
        for n in 0..2 * MAX_ENTRIES {
            let keep = 1000 + u64::try_from(n).unwrap_or_default();
            cache.insert(
                &format!("r.test/{n}"),
                None,
                &credentials(CacheScope::Image, keep),
                now,
            );
        }
        assert_eq!(cache.entries.len(), MAX_ENTRIES);
        assert!(cache.get("r.test/0", None, now).is_none() && cache.get("r.test/1999", None, now).is_some());
    }

    #[test]
    fn service_accounts_share_no_credentials() {
        let now = Instant::now();
        let account = |name: &str| Some(AccountKey::new(["ns", name], &BTreeMap::new(), None));
        let mut cache = Cache::default();
        cache.insert(
            "r.test/a",
            account("a"),
            &credentials(CacheScope::Global, 10),
            now,
        );
        let has = |account| cache.get("r.test/b", account, now).is_some();
        assert!(has(account("a")));
        assert!(!has(account("b")) && !has(None));
    }
}
