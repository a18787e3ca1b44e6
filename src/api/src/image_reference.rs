//! Image references: `[HOST[:PORT]/]PATH[:TAG][@DIGEST]`.
//!
//! In:  a user's text, or a NodeImage's name and tag.
//! Out: an [`ImageReference`] in the forms that runtimes, registries and NodeImages need, or what is wrong with the
//!      text.
//!
//! Grammar and normalization are those of the distribution project's `reference` package, which kubelet, containerd and
//! upstream use. A reference is stored in a NodeImage as a key (the familiar name) and a tag (the tag, or the digest if
//! there is one), and can be built from these two again.

#[cfg(test)]
mod tests;

use std::fmt;
use std::str::FromStr;

const DOCKER_HUB: &str = "docker.io";
const DOCKER_HUB_LEGACY: &str = "index.docker.io";
const OFFICIAL_PREFIX: &str = "library/";
const DEFAULT_TAG: &str = "latest";
const MAX_NAME: usize = 255;
const MAX_TAG: usize = 128;

/// A reference that cannot be parsed, and the reason.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("image reference {given:?} is not valid: {why}; expected NAME[:TAG][@DIGEST]")]
pub struct InvalidReference {
    /// The given text.
    pub given: String,
    /// The rule that it violates.
    pub why: &'static str,
}

/// A fully qualified image reference.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ImageReference {
    host: String,
    path: String,
    tag: Option<String>,
    digest: Option<String>,
}

impl ImageReference {
    /// Parses a reference as users write it: `nginx`, `nginx:1.27`, `host:5000/a/b@sha256:…`.
    pub fn parse(given: &str) -> Result<Self, InvalidReference> {
        Self::parse_parts(given).map_err(|why| InvalidReference {
            given: given.to_owned(),
            why,
        })
    }

    /// Joins the parts in a NodeImage: the image's name and a tag that may be a digest.
    pub fn from_name_and_tag(name: &str, tag: &str) -> Result<Self, InvalidReference> {
        let joined = join_name_and_tag(name, tag);
        let invalid = |why| InvalidReference {
            given: joined.clone(),
            why,
        };
        if tag.is_empty() {
            return Err(invalid("the tag is empty"));
        }
        let bare = Self::parse(name).map_err(|e| invalid(e.why))?;
        if bare.tag.is_some() || bare.digest.is_some() {
            return Err(invalid("the name already has a tag or a digest"));
        }
        if tag.contains(':') {
            check_digest(tag).map_err(invalid)?;
            Ok(Self {
                digest: Some(tag.to_owned()),
                ..bare
            })
        } else {
            check_tag(tag).map_err(invalid)?;
            Ok(Self {
                tag: Some(tag.to_owned()),
                ..bare
            })
        }
    }

    /// The registry's host, with its port if one was given: `docker.io`, `127.0.0.1:5000`.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The repository in the registry: `library/nginx`.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// `HOST/PATH`, which credentials are matched with.
    pub fn repository(&self) -> String {
        format!("{}/{}", self.host, self.path)
    }

    /// The tag as given, if any.
    pub fn tag(&self) -> Option<&str> {
        self.tag.as_deref()
    }

    /// The digest, if any.
    pub fn digest(&self) -> Option<&str> {
        self.digest.as_deref()
    }

    /// The name without Docker Hub's prefixes, as NodeImages use it for keys: `nginx`, `a/b`, `quay.io/c/d`.
    pub fn familiar_name(&self) -> String {
        let short = match self.path.strip_prefix(OFFICIAL_PREFIX) {
            Some(short) if !short.contains('/') => short,
            _ => &self.path,
        };
        // Only if it parses to the same again: `docker.io/a.example/b` without its host is an image of a different
        // registry.
        match Self::parse(short) {
            Ok(read) if read.host == self.host && read.path == self.path => short.to_owned(),
            _ => self.repository(),
        }
    }

    /// The `tag` in a NodeImage: the digest if there is one, else the tag, else `latest`.
    pub fn tag_or_digest(&self) -> &str {
        self.digest
            .as_deref()
            .or(self.tag.as_deref())
            .unwrap_or(DEFAULT_TAG)
    }

    /// Whether `other`, such as an entry of an image's `repoTags` or `repoDigests`, refers to the same image.
    pub fn is_same_image(&self, other: &str) -> bool {
        Self::parse(other).is_ok_and(|o| {
            o.host == self.host && o.path == self.path && o.tag_or_digest() == self.tag_or_digest()
        })
    }

    fn parse_parts(given: &str) -> Result<Self, &'static str> {
        if given.is_empty() {
            return Err("it is empty");
        }
        if given.len() == 64 && given.bytes().all(is_lower_hex) {
            return Err("a bare image ID cannot be pulled");
        }
        let (rest, digest) = match given.split_once('@') {
            Some((rest, digest)) => (rest, Some(digest)),
            None => (given, None),
        };
        let (name, tag) = split_tag(rest);
        let (host, path) = split_host(name);
        check_host(&host)?;
        check_path(&path)?;
        if host.len() + 1 + path.len() > MAX_NAME {
            return Err("the name is longer than 255 characters");
        }
        tag.map_or(Ok(()), check_tag)?;
        digest.map_or(Ok(()), check_digest)?;
        Ok(Self {
            host,
            path,
            tag: tag.map(str::to_owned),
            digest: digest.map(str::to_owned),
        })
    }
}

/// The form for a runtime: fully qualified, with the digest if there is one and the tag otherwise.
impl fmt::Display for ImageReference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&join_name_and_tag(&self.repository(), self.tag_or_digest()))
    }
}

impl FromStr for ImageReference {
    type Err = InvalidReference;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        Self::parse(s)
    }
}

/// `NAME:TAG`, or `NAME@DIGEST` if `tag` is a digest. Checks nothing.
pub fn join_name_and_tag(name: &str, tag: &str) -> String {
    let separator = if tag.contains(':') { '@' } else { ':' };
    format!("{name}{separator}{tag}")
}

fn split_tag(rest: &str) -> (&str, Option<&str>) {
    let last_part = rest.rfind('/').map_or(0, |slash| slash + 1);
    match rest[last_part..].find(':') {
        // `host:5000` alone has no path, and is the repository `host` with tag `5000`.
        Some(colon) => (&rest[..last_part + colon], Some(&rest[last_part + colon + 1..])),
        None => (rest, None),
    }
}

fn split_host(name: &str) -> (String, String) {
    let (host, path) = match name.split_once('/') {
        Some((first, path)) if is_host(first) => (first, path),
        _ => (DOCKER_HUB, name),
    };
    let host = if host == DOCKER_HUB_LEGACY {
        DOCKER_HUB
    } else {
        host
    };
    if host == DOCKER_HUB && !path.contains('/') {
        return (host.to_owned(), format!("{OFFICIAL_PREFIX}{path}"));
    }
    (host.to_owned(), path.to_owned())
}

fn is_host(first: &str) -> bool {
    first == "localhost" || first.contains(['.', ':']) || first.chars().any(|c| c.is_ascii_uppercase())
}

fn check_host(host: &str) -> Result<(), &'static str> {
    let (name, port) = match host.strip_prefix('[') {
        Some(v6) => {
            let (address, rest) = v6.split_once(']').ok_or("the host's bracket is not closed")?;
            if address.is_empty() || !address.bytes().all(|b| b.is_ascii_hexdigit() || b == b':') {
                return Err("the host is not an IPv6 address");
            }
            ("", rest)
        }
        None => host.split_at(host.find(':').unwrap_or(host.len())),
    };
    let part_ok = |part: &str| {
        !part.is_empty()
            && !part.starts_with('-')
            && !part.ends_with('-')
            && part.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
    };
    if !host.starts_with('[') && !name.split('.').all(part_ok) {
        return Err("the host may have letters, digits, '-' and '.' only");
    }
    match port.strip_prefix(':') {
        Some(digits) if !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit()) => Ok(()),
        Some(_) => Err("the port is not a number"),
        None if port.is_empty() => Ok(()),
        None => Err("something follows the host's bracket"),
    }
}

fn check_path(path: &str) -> Result<(), &'static str> {
    for part in path.split('/') {
        if part.is_empty() {
            return Err("a part of the name is empty");
        }
        if part.bytes().any(|b| b.is_ascii_uppercase()) {
            return Err("the name must be lower case");
        }
        if !part
            .bytes()
            .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'.' | b'_' | b'-'))
        {
            return Err("the name may have lower-case letters, digits, '.', '_' and '-' only");
        }
        if !separators_ok(part) {
            return Err(
                "in the name, one '.', one or two '_' or any number of '-' may stand between letters or digits",
            );
        }
    }
    Ok(())
}

/// Between letters and digits: `.`, `_`, `__` or dashes, never mixed, never at an end.
fn separators_ok(part: &str) -> bool {
    let alphanumeric = |c: char| c.is_ascii_alphanumeric();
    if part.starts_with(|c| !alphanumeric(c)) || part.ends_with(|c| !alphanumeric(c)) {
        return false;
    }
    part.split(alphanumeric)
        .all(|run| matches!(run, "" | "." | "_" | "__") || run.bytes().all(|b| b == b'-'))
}

fn check_tag(tag: &str) -> Result<(), &'static str> {
    if tag.is_empty() {
        return Err("the tag is empty");
    }
    if tag.len() > MAX_TAG {
        return Err("the tag is longer than 128 characters");
    }
    let word = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
    if !tag.bytes().all(|b| word(b) || matches!(b, b'.' | b'-')) || tag.starts_with(['.', '-']) {
        return Err("the tag may have letters, digits, '_', '.' and '-', and must not begin with '.' or '-'");
    }
    Ok(())
}

fn check_digest(digest: &str) -> Result<(), &'static str> {
    let (algorithm, hex) = digest.split_once(':').ok_or("the digest has no algorithm")?;
    let length = match algorithm {
        "sha256" => 64,
        "sha384" => 96,
        "sha512" => 128,
        _ => return Err("the digest's algorithm is not sha256, sha384 or sha512"),
    };
    if hex.len() != length {
        return Err("the digest has the wrong length");
    }
    if !hex.bytes().all(is_lower_hex) {
        return Err("the digest must be lower-case hexadecimal");
    }
    Ok(())
}

fn is_lower_hex(b: u8) -> bool {
    b.is_ascii_digit() || (b'a'..=b'f').contains(&b)
}
