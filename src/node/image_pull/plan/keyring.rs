//! Which credentials of which Secret go with an image: kubelet's keyring rules.
//!
//! Entries are matched by host (a `*` stands for part of a name between dots) and by the beginning of the path, the
//! most specific first; all that match are kept, to be tried in order. Docker Hub has a default entry.

use std::collections::BTreeMap;

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD};
use serde::Deserialize;

/// `kubernetes.io/dockerconfigjson`
pub const TYPE_JSON: &str = "kubernetes.io/dockerconfigjson";
/// `kubernetes.io/dockercfg`
pub const TYPE_CFG: &str = "kubernetes.io/dockercfg";
const KEY_JSON: &str = ".dockerconfigjson";
const KEY_CFG: &str = ".dockercfg";
const DEFAULT_REGISTRY: &str = "index.docker.io";

/// Why credentials cannot be read. Says nothing of what is in them.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The Secret is of another kind.
    #[error("it is of type {found:?}; expected {TYPE_JSON} or {TYPE_CFG}")]
    Type {
        /// Its type.
        found: String,
    },
    /// The Secret has no such entry.
    #[error("it has no entry {0:?}")]
    NoEntry(&'static str),
    /// It is not JSON, or not of the right shape.
    #[error("its {entry} is not a Docker configuration: {at}")]
    Malformed {
        /// The entry, or the file.
        entry: &'static str,
        /// Where reading stopped.
        at: String,
    },
    /// An `auth` is not base64 of `user:password`.
    #[error("its entry for {registry:?} has an auth that is not base64 of USER:PASSWORD")]
    Auth {
        /// The registry of the entry.
        registry: String,
    },
}

/// A user's credentials for a registry. `Debug` shows the user only.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct Credentials {
    /// User name.
    pub username: String,
    /// Password.
    pub password: String,
    /// Token instead of a password, or empty.
    pub identity_token: String,
    /// Bearer token instead of either, or empty.
    pub registry_token: String,
}

impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Credentials")
            .field("username", &self.username)
            .finish_non_exhaustive()
    }
}

#[derive(Deserialize)]
struct ConfigJson {
    #[serde(default)]
    auths: BTreeMap<String, Entry>,
}

#[derive(Deserialize, Default)]
struct Entry {
    #[serde(default)]
    username: String,
    #[serde(default)]
    password: String,
    #[serde(default)]
    auth: String,
    #[serde(default, alias = "identityToken")]
    identitytoken: String,
    #[serde(default, alias = "registryToken")]
    registrytoken: String,
}

/// Credentials by the registry, and path in it, that they are for.
#[derive(Debug, Clone, Default)]
pub struct Keyring {
    entries: BTreeMap<String, Vec<Credentials>>,
}

impl Keyring {
    /// Adds what a Secret holds.
    pub fn add_secret(&mut self, type_: &str, data: &BTreeMap<String, Vec<u8>>) -> Result<(), Error> {
        match type_ {
            TYPE_JSON => self.add_config_json(data.get(KEY_JSON).ok_or(Error::NoEntry(KEY_JSON))?, KEY_JSON),
            TYPE_CFG => {
                let auths = data.get(KEY_CFG).ok_or(Error::NoEntry(KEY_CFG))?;
                self.add(read(auths, KEY_CFG)?)
            }
            other => Err(Error::Type {
                found: other.to_owned(),
            }),
        }
    }

    /// Adds a Docker configuration file's `auths`. `entry` names it in errors.
    pub fn add_config_json(&mut self, json: &[u8], entry: &'static str) -> Result<(), Error> {
        self.add(read::<ConfigJson>(json, entry)?.auths)
    }

    fn add(&mut self, auths: BTreeMap<String, Entry>) -> Result<(), Error> {
        let read: Result<Vec<_>, Error> = auths
            .into_iter()
            .map(|(r, e)| Ok((key(&r), credentials(&r, e)?)))
            .collect();
        for (key, credentials) in read? {
            self.entries.entry(key).or_default().push(credentials);
        }
        Ok(())
    }

    /// What to try for `repository` (`HOST/PATH`), in order; nothing means anonymously.
    pub fn lookup(&self, repository: &str) -> Vec<Credentials> {
        // Backwards, the longer of two keys with the same beginning comes first.
        let matching = self
            .entries
            .iter()
            .rev()
            .filter(|(key, _)| matches(key, repository));
        let found: Vec<Credentials> = matching.flat_map(|(_, list)| list.clone()).collect();
        let host = repository.split('/').next().unwrap_or_default();
        if found.is_empty() && matches!(host, "docker.io" | DEFAULT_REGISTRY) {
            return self.entries.get(DEFAULT_REGISTRY).cloned().unwrap_or_default();
        }
        found
    }
}

fn read<'a, T: Deserialize<'a>>(json: &'a [u8], entry: &'static str) -> Result<T, Error> {
    // serde's own words may quote the value, which is a secret: only the place is told.
    serde_json::from_slice(json).map_err(|e| Error::Malformed {
        entry,
        at: format!("line {}, column {}", e.line(), e.column()),
    })
}

/// A registry as users write it, reduced to `HOST[/PATH]`: no scheme, no `/v1/` or `/v2/`.
fn key(registry: &str) -> String {
    let bare = registry
        .strip_prefix("https://")
        .or_else(|| registry.strip_prefix("http://"))
        .unwrap_or(registry);
    let (host, path) = bare.split_at(bare.find('/').unwrap_or(bare.len()));
    let path = match path {
        "/v1" | "/v2" => "",
        _ => path
            .strip_prefix("/v1/")
            .or_else(|| path.strip_prefix("/v2/"))
            .map_or(path, |rest| {
                let at = path.len() - rest.len() - 1;
                &path[at..]
            }),
    };
    if path == "/" {
        host.to_owned()
    } else {
        format!("{host}{path}")
    }
}

fn credentials(registry: &str, entry: Entry) -> Result<Credentials, Error> {
    let mut found = Credentials {
        username: entry.username,
        password: entry.password,
        identity_token: entry.identitytoken,
        registry_token: entry.registrytoken,
    };
    if !entry.auth.is_empty() {
        let invalid = || Error::Auth {
            registry: registry.to_owned(),
        };
        let plain = STANDARD
            .decode(entry.auth.trim())
            .or_else(|_| STANDARD_NO_PAD.decode(entry.auth.trim()))
            .map_err(|_| invalid())?;
        let text = String::from_utf8(plain).map_err(|_| invalid())?;
        let (user, password) = text.split_once(':').ok_or_else(invalid)?;
        found.username = user.to_owned();
        found.password = password.trim_end_matches('\0').to_owned();
    }
    Ok(found)
}

fn matches(key: &str, repository: &str) -> bool {
    let split = |s: &str| {
        let (host, path) = s.split_at(s.find('/').unwrap_or(s.len()));
        let (name, port) = host.split_at(host.find(':').unwrap_or(host.len()));
        (name.to_owned(), port.to_owned(), path.to_owned())
    };
    let (name, port, path) = split(key);
    let (image_name, image_port, image_path) = split(repository);
    let parts: Vec<&str> = name.split('.').collect();
    let image_parts: Vec<&str> = image_name.split('.').collect();
    port == image_port
        && parts.len() == image_parts.len()
        && image_path.starts_with(&path)
        && parts
            .iter()
            .zip(&image_parts)
            .all(|(pattern, part)| glob(pattern.as_bytes(), part.as_bytes()))
}

/// `*` stands for any characters, `?` for one; an IPv6 host's brackets are themselves.
fn glob(pattern: &[u8], text: &[u8]) -> bool {
    match (pattern.split_first(), text.split_first()) {
        (None, None) => true,
        (Some((b'*', rest)), _) => (0..=text.len()).any(|n| glob(rest, &text[n..])),
        (Some((b'?', rest)), Some((_, text))) => glob(rest, text),
        (Some((p, rest)), Some((t, text))) => p == t && glob(rest, text),
        _ => false,
    }
}
