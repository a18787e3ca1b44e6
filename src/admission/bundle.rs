//! Our certificates: what they are, when new ones are due, and how they are made.
//!
//! One authority of our own signs one serving certificate. Both live in one Secret that all replicas
//! share. A new authority is announced together with the old one until that has expired.

use std::collections::{BTreeMap, BTreeSet};

use jiff::{Span, Timestamp, tz::TimeZone};
use k8s_openapi::ByteString;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};

use super::Error;

const AUTHORITY_DAYS: i64 = 3650;
const SERVING_DAYS: i64 = 365;
/// Renewed when less than this is left.
const RENEW_SERVING_DAYS: i64 = 120;
const RENEW_AUTHORITY_DAYS: i64 = 730;

/// The certificates with their keys, all in PEM. `Debug` shows no key.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Bundle {
    /// What callers trust: the authority, and the one before it while that is valid.
    pub ca: String,
    ca_key: String,
    ca_until: Timestamp,
    /// The serving certificate.
    pub certificate: String,
    /// Key of the serving certificate.
    pub key: String,
    until: Timestamp,
    names: BTreeSet<String>,
}

impl std::fmt::Debug for Bundle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bundle")
            .field("until", &self.until)
            .field("names", &self.names)
            .finish_non_exhaustive()
    }
}

/// What a set of certificates needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Need {
    /// Nothing.
    Nothing,
    /// Another serving certificate.
    Serving,
    /// Another authority, and then another serving certificate.
    Authority,
}

impl Bundle {
    /// When the serving certificate expires.
    pub fn until(&self) -> Timestamp {
        self.until
    }

    /// The names that it is for.
    pub fn names(&self) -> String {
        let names: Vec<&str> = self.names.iter().map(String::as_str).collect();
        names.join(",")
    }

    /// What is needed for `names` to be served at `now` and for long enough.
    pub fn need(&self, names: &BTreeSet<String>, now: Timestamp) -> Need {
        if self.ca_until < days_after(now, RENEW_AUTHORITY_DAYS) {
            Need::Authority
        } else if self.until < days_after(now, RENEW_SERVING_DAYS) || !names.is_subset(&self.names) {
            Need::Serving
        } else {
            Need::Nothing
        }
    }

    /// New certificates from nothing.
    pub fn make(names: &BTreeSet<String>, now: Timestamp) -> Result<Self, Error> {
        let key = KeyPair::generate().map_err(failed)?;
        let ca_until = days_after(now, AUTHORITY_DAYS);
        let ca = authority(now, ca_until)?.self_signed(&key).map_err(failed)?.pem();
        let empty = Self {
            ca,
            ca_key: key.serialize_pem(),
            ca_until,
            certificate: String::new(),
            key: String::new(),
            until: now,
            names: BTreeSet::new(),
        };
        empty.reissue(names, now)
    }

    /// The same authority, and a new serving certificate for `names` and those served until now.
    pub fn reissue(&self, names: &BTreeSet<String>, now: Timestamp) -> Result<Self, Error> {
        let names: BTreeSet<String> = self.names.union(names).cloned().collect();
        let ca_key = KeyPair::from_pem(&self.ca_key).map_err(failed)?;
        let issuer = Issuer::new(authority(now, self.ca_until)?, ca_key);
        let key = KeyPair::generate().map_err(failed)?;
        let until = days_after(now, SERVING_DAYS).min(self.ca_until);
        let mut params = CertificateParams::new(names.iter().cloned().collect::<Vec<_>>()).map_err(failed)?;
        params
            .distinguished_name
            .push(DnType::CommonName, "kruise-manager");
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.use_authority_key_identifier_extension = true;
        limit(&mut params, now, until);
        let certificate = params.signed_by(&key, &issuer).map_err(failed)?.pem();
        Ok(Self {
            certificate,
            key: key.serialize_pem(),
            until,
            names,
            ..self.clone()
        })
    }

    /// Another authority; the old one stays trusted, because other replicas still serve its certificate.
    pub fn replace_authority(&self, names: &BTreeSet<String>, now: Timestamp) -> Result<Self, Error> {
        let mut new = Self::make(&self.names.union(names).cloned().collect(), now)?;
        let old = self
            .ca
            .split_inclusive("-----END CERTIFICATE-----")
            .next()
            .unwrap_or_default()
            .trim();
        if self.ca_until > now {
            new.ca = format!("{}\n{old}\n", new.ca.trim());
        }
        Ok(new)
    }

    /// The data of the Secret that keeps this.
    pub fn to_data(&self) -> BTreeMap<String, ByteString> {
        let pairs = [
            ("ca.crt", self.ca.clone()),
            ("ca.key", self.ca_key.clone()),
            ("ca.until", self.ca_until.to_string()),
            ("tls.crt", self.certificate.clone()),
            ("tls.key", self.key.clone()),
            ("tls.until", self.until.to_string()),
            ("tls.names", self.names()),
        ];
        pairs
            .into_iter()
            .map(|(key, text)| (key.to_owned(), ByteString(text.into_bytes())))
            .collect()
    }

    /// What a Secret's data keeps; `None` when something is missing or unreadable, so that it is made anew.
    pub fn from_data(data: &BTreeMap<String, ByteString>) -> Option<Self> {
        let text = |key: &str| String::from_utf8(data.get(key)?.0.clone()).ok();
        let bundle = Self {
            ca: text("ca.crt")?,
            ca_key: text("ca.key")?,
            ca_until: text("ca.until")?.parse().ok()?,
            certificate: text("tls.crt")?,
            key: text("tls.key")?,
            until: text("tls.until")?.parse().ok()?,
            names: text("tls.names")?.split(',').map(str::to_owned).collect(),
        };
        let readable = KeyPair::from_pem(&bundle.key).is_ok() && KeyPair::from_pem(&bundle.ca_key).is_ok();
        (readable && bundle.certificate.contains("BEGIN CERTIFICATE")).then_some(bundle)
    }
}

fn authority(now: Timestamp, until: Timestamp) -> Result<CertificateParams, Error> {
    let mut params = CertificateParams::new(Vec::new()).map_err(failed)?;
    params
        .distinguished_name
        .push(DnType::CommonName, "kruise-manager webhook authority");
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
    limit(&mut params, now, until);
    Ok(params)
}

fn failed(why: rcgen::Error) -> Error {
    Error::Certificate(why.to_string())
}

fn days_after(time: Timestamp, days: i64) -> Timestamp {
    time.saturating_add(Span::new().hours(24 * days)).unwrap_or(time)
}

/// Year, month and day as `rcgen` wants them.
fn day(time: Timestamp) -> (i32, u8, u8) {
    let day = time.to_zoned(TimeZone::UTC).date();
    let small = |number: i8| u8::try_from(number).unwrap_or(1);
    (i32::from(day.year()), small(day.month()), small(day.day()))
}

/// Sets from when and until when a certificate is valid; a day of slack for clocks that are behind.
fn limit(params: &mut CertificateParams, now: Timestamp, until: Timestamp) {
    let (year, month, date) = day(days_after(now, -1));
    params.not_before = rcgen::date_time_ymd(year, month, date);
    let (year, month, date) = day(until);
    params.not_after = rcgen::date_time_ymd(year, month, date);
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn names(of: &[&str]) -> BTreeSet<String> {
        of.iter().map(|name| (*name).to_owned()).collect()
    }

    fn now() -> Timestamp {
        "2026-03-01T12:00:00Z".parse().unwrap()
    }

    #[test]
    fn a_secret_keeps_everything() {
        let bundle = Bundle::make(&names(&["localhost", "10.0.0.1"]), now()).unwrap();
        assert_eq!(Bundle::from_data(&bundle.to_data()), Some(bundle.clone()));
        let mut broken = bundle.to_data();
        broken.insert("tls.key".into(), ByteString(b"x".to_vec()));
        assert_eq!(Bundle::from_data(&broken), None);
        broken.remove("tls.key");
        assert_eq!(Bundle::from_data(&broken), None);
    }

    #[test]
    fn new_ones_are_due_in_time_and_for_new_names() {
        let bundle = Bundle::make(&names(&["a"]), now()).unwrap();
        assert_eq!(bundle.need(&names(&["a"]), now()), Need::Nothing);
        assert_eq!(bundle.need(&names(&["a", "b"]), now()), Need::Serving);
        assert_eq!(bundle.need(&names(&["a"]), days_after(now(), 300)), Need::Serving);
        assert_eq!(
            bundle.need(&names(&["a"]), days_after(now(), 3000)),
            Need::Authority
        );
        let both = bundle.reissue(&names(&["b"]), now()).unwrap();
        assert_eq!(both.need(&names(&["a", "b"]), now()), Need::Nothing);
        assert_eq!(both.ca, bundle.ca);
    }

    #[test]
    fn an_old_authority_stays_trusted_beside_the_new() {
        let old = Bundle::make(&names(&["a"]), now()).unwrap();
        let new = old
            .replace_authority(&names(&["b"]), days_after(now(), 3000))
            .unwrap();
        assert!(new.ca.contains(old.ca.trim()));
        assert_eq!(new.ca.matches("BEGIN CERTIFICATE").count(), 2);
        assert_eq!(
            new.need(&names(&["a", "b"]), days_after(now(), 3000)),
            Need::Nothing
        );
        let newer = new
            .replace_authority(&names(&["a"]), days_after(now(), 6000))
            .unwrap();
        assert_eq!(newer.ca.matches("BEGIN CERTIFICATE").count(), 2);
    }
}
