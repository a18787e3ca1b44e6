//! Selects the credentials for an image from pull secrets, by kubelet's keyring rules.
//!
//! Entries are matched by host (a `*` stands for part of a name between dots) and by the beginning of the path, the
//! most specific first; all matches are kept, to be tried in order. Docker Hub has a default entry.
//!
//! Any user who may create a job chooses the content of its Secrets: the amount that is kept is bounded, and matching
//! an entry takes time proportional to its length.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD};
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

/// `kubernetes.io/dockerconfigjson`
pub const TYPE_JSON: &str = "kubernetes.io/dockerconfigjson";
/// `kubernetes.io/dockercfg`
pub const TYPE_CFG: &str = "kubernetes.io/dockercfg";
/// The key of the Docker configuration in a Secret of type [`TYPE_JSON`].
pub const KEY_JSON: &str = ".dockerconfigjson";
/// The key of the Docker configuration in a Secret of type [`TYPE_CFG`].
pub const KEY_CFG: &str = ".dockercfg";
const DEFAULT_REGISTRY: &str = "index.docker.io";
/// Maximum number of entries of one Docker configuration.
const MAX_ENTRIES: usize = 1000;
/// Maximum bytes of an entry's registry, and maximum characters of one in a message. No image name has more than 255;
/// the rest is for `*`, scheme and version.
const MAX_REGISTRY_LEN: usize = 512;

/// Why credentials cannot be read. Contains nothing of the Secret's content.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The Secret has an unsupported type.
    #[error("it is of type {found:?}; expected {TYPE_JSON} or {TYPE_CFG}")]
    UnsupportedType {
        /// Type of the Secret.
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
    /// It has more entries than the maximum.
    #[error("its {entry} has more than {MAX_ENTRIES} entries")]
    TooManyEntries {
        /// The entry, or the file.
        entry: &'static str,
    },
    /// An `auth` is not base64 of `user:password`.
    #[error("its entry for {registry:?} has an auth that is not base64 of USER:PASSWORD")]
    InvalidAuth {
        /// The registry of the entry.
        registry: String,
    },
}

/// A user's credentials for a registry. `Debug` shows the user only.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct Credentials {
    /// User name for the registry.
    pub username: String,
    /// Password of the user.
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

/// A Docker configuration file.
#[derive(Default)]
struct ConfigJson {
    auths: Auths,
    has_helpers: bool,
}

impl<'de> JsonFields<'de> for ConfigJson {
    fn field<A: MapAccess<'de>>(&mut self, name: &str, map: &mut A) -> Result<(), A::Error> {
        match name.to_ascii_lowercase().as_str() {
            "auths" => self.auths = map.next_value_seed(FieldsSeed::new())?,
            "credsstore" | "credhelpers" => {
                // Read as text: a tree of many small values takes a hundred times their length.
                self.has_helpers |= is_non_empty(map.next_value::<&RawValue>()?.get());
            }
            _ => drop(map.next_value::<IgnoredAny>()?),
        }
        Ok(())
    }
}

/// Whether this is a non-empty string or object.
fn is_non_empty(json: &str) -> bool {
    match json.split_at_checked(1) {
        Some(("\"", rest)) => rest != "\"",
        Some(("{", rest)) => !rest.trim_start().starts_with('}'),
        _ => false,
    }
}

/// The entries of a Docker configuration by registry.
#[derive(Default)]
struct Auths {
    entries: BTreeMap<String, Entry>,
    too_many: bool,
}

impl<'de> JsonFields<'de> for Auths {
    fn field<A: MapAccess<'de>>(&mut self, name: &str, map: &mut A) -> Result<(), A::Error> {
        if self.entries.len() == MAX_ENTRIES {
            self.too_many = true;
            map.next_value::<IgnoredAny>()?;
        } else {
            self.entries
                .insert(name.to_owned(), map.next_value_seed(FieldsSeed::new())?);
        }
        Ok(())
    }
}

#[derive(Default)]
struct Entry {
    username: String,
    password: String,
    auth: String,
    identity_token: String,
    registry_token: String,
}

impl<'de> JsonFields<'de> for Entry {
    fn field<A: MapAccess<'de>>(&mut self, name: &str, map: &mut A) -> Result<(), A::Error> {
        let field = match name.to_ascii_lowercase().as_str() {
            "username" => &mut self.username,
            "password" => &mut self.password,
            "auth" => &mut self.auth,
            "identitytoken" => &mut self.identity_token,
            "registrytoken" => &mut self.registry_token,
            _ => {
                map.next_value::<IgnoredAny>()?;
                return Ok(());
            }
        };
        if let Some(text) = map.next_value::<Option<String>>()? {
            *field = text;
        }
        Ok(())
    }
}

/// A struct that is read field by field as Go's decoder does: names match in any case, the last of two equal ones is
/// used, and `null` is an object without fields.
trait JsonFields<'de>: Default {
    /// Reads the value of one field.
    fn field<A: MapAccess<'de>>(&mut self, name: &str, map: &mut A) -> Result<(), A::Error>;
}

/// Reads a `T`.
struct FieldsSeed<T>(PhantomData<T>);

impl<T> FieldsSeed<T> {
    fn new() -> Self {
        Self(PhantomData)
    }
}

impl<'de, T: JsonFields<'de>> DeserializeSeed<'de> for FieldsSeed<T> {
    type Value = T;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<T, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de, T: JsonFields<'de>> Visitor<'de> for FieldsSeed<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_unit<E>(self) -> Result<T, E> {
        Ok(T::default())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<T, A::Error> {
        let mut fields = T::default();
        while let Some(name) = map.next_key::<String>()? {
            fields.field(&name, &mut map)?;
        }
        Ok(fields)
    }
}

/// A configuration can also name credential helpers: programs of the machine that it was written on. Kubelet ignores
/// them in pull secrets, and so does the daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HelpersIgnored;

impl fmt::Display for HelpersIgnored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("credsStore and credHelpers are ignored, as kubelet ignores them; only credentials in auths are used")
    }
}

/// Which repositories an entry is for: a host, in which a `*` stands for part of a name between dots, and the beginning
/// of a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pattern(String);

impl Pattern {
    /// Reads a registry as users write it; `None` if no image can match it.
    #[must_use]
    pub fn parse(registry: &str) -> Option<Self> {
        registry_key(registry).map(Self)
    }

    /// Whether a repository (`HOST/PATH`) matches.
    #[must_use]
    pub fn matches(&self, repository: &str) -> bool {
        registry_matches(&self.0, repository)
    }
}

/// Credentials by registry and path.
#[derive(Debug, Clone, Default)]
pub struct Keyring {
    entries: BTreeMap<String, Vec<Credentials>>,
}

impl Keyring {
    /// Adds the credentials of a Secret of that type; `data` returns the value of a key.
    ///
    /// # Errors
    /// When the Secret cannot be used; nothing of it is added then.
    pub fn add_secret<'a>(
        &mut self,
        type_: &str,
        data: impl Fn(&'static str) -> Option<&'a [u8]>,
    ) -> Result<Option<HelpersIgnored>, Error> {
        let value = |key| data(key).ok_or(Error::NoEntry(key));
        match type_ {
            TYPE_JSON => self.add_config_json(value(KEY_JSON)?, KEY_JSON),
            TYPE_CFG => self
                .add_auths(parse(value(KEY_CFG)?, KEY_CFG)?, KEY_CFG)
                .map(|()| None),
            other => Err(Error::UnsupportedType {
                found: other.to_owned(),
            }),
        }
    }

    /// Adds a Docker configuration file's `auths`. `entry` names it in errors.
    ///
    /// # Errors
    /// When the file cannot be used; nothing of it is added then.
    pub fn add_config_json(
        &mut self,
        json: &[u8],
        entry: &'static str,
    ) -> Result<Option<HelpersIgnored>, Error> {
        let config: ConfigJson = parse(json, entry)?;
        self.add_auths(config.auths, entry)?;
        Ok(config.has_helpers.then_some(HelpersIgnored))
    }

    fn add_auths(&mut self, auths: Auths, entry: &'static str) -> Result<(), Error> {
        if auths.too_many {
            return Err(Error::TooManyEntries { entry });
        }
        let mut parsed = Vec::new();
        for (registry, entry) in auths.entries {
            let credentials = decode_credentials(&registry, entry)?;
            parsed.push((registry, credentials));
        }
        for (registry, credentials) in parsed {
            self.add(&registry, credentials);
        }
        Ok(())
    }

    /// Adds the credentials for a registry, as users write it; without effect if no image can match it.
    pub fn add(&mut self, registry: &str, credentials: Credentials) {
        // Docker Desktop writes empty entries for registries whose credentials are in a helper.
        if let Some(key) = registry_key(registry)
            && credentials != Credentials::default()
        {
            self.entries.entry(key).or_default().push(credentials);
        }
    }

    /// The credentials for `repository` (`HOST/PATH`), in the order to try them; empty means an anonymous pull.
    pub fn lookup(&self, repository: &str) -> Vec<Credentials> {
        // In reverse order, the longer of two keys with the same beginning comes first.
        let matching_entries = self
            .entries
            .iter()
            .rev()
            .filter(|(key, _)| registry_matches(key, repository));
        let found: Vec<Credentials> = matching_entries.flat_map(|(_, list)| list.clone()).collect();
        let host = repository.split('/').next().unwrap_or_default();
        if found.is_empty() && matches!(host, "docker.io" | DEFAULT_REGISTRY) {
            return self.entries.get(DEFAULT_REGISTRY).cloned().unwrap_or_default();
        }
        found
    }
}

fn parse<'a, T: JsonFields<'a>>(json: &'a [u8], entry: &'static str) -> Result<T, Error> {
    let mut deserializer = serde_json::Deserializer::from_slice(json);
    let parsed = FieldsSeed::new().deserialize(&mut deserializer);
    let parsed = parsed.and_then(|read| deserializer.end().map(|()| read));
    // serde's error may quote the value, which is a secret: only the position is reported.
    parsed.map_err(|e| Error::Malformed {
        entry,
        at: format!("line {}, column {}", e.line(), e.column()),
    })
}

/// A registry as users write it, reduced to `HOST[:PORT][/PATH]`: no scheme, user or query, no `/v1/` or `/v2/`. None
/// if no image can match it.
fn registry_key(registry: &str) -> Option<String> {
    if registry.len() > MAX_REGISTRY_LEN {
        return None;
    }
    let authority_and_path = registry
        .strip_prefix("https://")
        .or_else(|| registry.strip_prefix("http://"))
        .unwrap_or(registry);
    let authority_and_path = authority_and_path
        .split(['?', '#'])
        .next()
        .unwrap_or(authority_and_path);
    let (host, path) =
        authority_and_path.split_at(authority_and_path.find('/').unwrap_or(authority_and_path.len()));
    let host = host.rsplit_once('@').map_or(host, |(_, host)| host);
    let host = host.strip_suffix(':').unwrap_or(host);
    let is_host_byte = |b: u8| b.is_ascii_alphanumeric() || b".-_*:[]".contains(&b);
    let star_in_address = host.contains('[') && host.contains('*');
    if host.is_empty() || star_in_address || !host.bytes().all(is_host_byte) {
        return None;
    }
    let path = ["/v1/", "/v2/"]
        .iter()
        .find_map(|version| path.strip_prefix(version))
        .map_or_else(|| path.to_owned(), |rest| format!("/{rest}"));
    Some(match path.as_str() {
        "/" => host.to_owned(),
        _ => format!("{host}{path}"),
    })
}

fn decode_credentials(registry: &str, entry: Entry) -> Result<Credentials, Error> {
    let mut found = Credentials {
        username: entry.username,
        password: entry.password,
        identity_token: entry.identity_token,
        registry_token: entry.registry_token,
    };
    if !entry.auth.is_empty() {
        let invalid = || Error::InvalidAuth {
            registry: registry.chars().take(MAX_REGISTRY_LEN).collect(),
        };
        let decoded = STANDARD
            .decode(entry.auth.trim())
            .or_else(|_| STANDARD_NO_PAD.decode(entry.auth.trim()))
            .map_err(|_| invalid())?;
        let text = String::from_utf8(decoded).map_err(|_| invalid())?;
        let (user, password) = text.split_once(':').ok_or_else(invalid)?;
        found.username = user.to_owned();
        found.password = password.trim_end_matches('\0').to_owned();
    }
    Ok(found)
}

fn registry_matches(key: &str, repository: &str) -> bool {
    let split = |s: &'_ str| {
        let (host, path) = s.split_at(s.find('/').unwrap_or(s.len()));
        // The host of an IPv6 address contains colons between brackets.
        let port = host.rfind(':').filter(|_| !host.ends_with(']'));
        let (name, port) = host.split_at(port.unwrap_or(host.len()));
        (name.to_owned(), port.to_owned(), path.to_owned())
    };
    let (name, port, path) = split(key);
    let (image_name, image_port, image_path) = split(repository);
    port == image_port
        && image_path.starts_with(&path)
        && name.split('.').count() == image_name.split('.').count()
        && name
            .split('.')
            .zip(image_name.split('.'))
            .all(|(pattern, part)| glob(pattern, part))
}

/// Whether `text` matches `pattern`, in which `*` stands for any characters. For the text between two stars the first
/// match is as good as any later one, so no backtracking is needed.
fn glob(pattern: &str, text: &str) -> bool {
    let Some((first, rest)) = pattern.split_once('*') else {
        return pattern == text;
    };
    let (middle, last) = rest.rsplit_once('*').unwrap_or(("", rest));
    let middle_text = text.strip_prefix(first).and_then(|text| text.strip_suffix(last));
    let Some(mut remaining) = middle_text else {
        return false;
    };
    middle.split('*').all(|piece| match remaining.split_once(piece) {
        Some((_, after)) => {
            remaining = after;
            true
        }
        None => false,
    })
}
