//! Our certificates: what they are, when new ones are due, and how they are made.
//!
//! An authority of our own signs one serving certificate, and its key is not kept: nobody can sign another one. Both
//! certificates live in one Secret that all replicas share. A new authority is announced together with those before it,
//! because other replicas still serve what they signed.

use std::collections::{BTreeMap, BTreeSet};

use jiff::{Span, Timestamp, tz::TimeZone};
use k8s_openapi::ByteString;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};

use super::Error;

const DAYS: i64 = 365;
/// Renewed when less than this is left.
const RENEW_DAYS: i64 = 120;
/// Authorities that are announced: replicas that start with other names one after the other make one each.
const AUTHORITIES: usize = 4;
const END: &str = "-----END CERTIFICATE-----";

/// The certificates and the key of the serving one, all in PEM. `Debug` shows no key.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Bundle {
    /// What callers trust: the authority, and those before it.
    pub ca: String,
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

impl Bundle {
    /// When the certificates expire.
    pub fn until(&self) -> Timestamp {
        self.until
    }

    /// The names that the serving certificate is for.
    pub fn names(&self) -> String {
        let names: Vec<&str> = self.names.iter().map(String::as_str).collect();
        names.join(",")
    }

    /// The authority that signed the serving certificate.
    pub fn authority(&self) -> &str {
        self.ca.split_inclusive(END).next().unwrap_or_default().trim()
    }

    /// Whether `names` are served at `now` and for long enough.
    pub fn serves(&self, names: &BTreeSet<String>, now: Timestamp) -> bool {
        self.until >= days_after(now, RENEW_DAYS) && names.is_subset(&self.names)
    }

    /// New certificates from nothing.
    pub fn make(names: &BTreeSet<String>, now: Timestamp) -> Result<Self, Error> {
        let until = days_after(now, DAYS);
        let authority = authority(now, until)?;
        let ca_key = KeyPair::generate().map_err(failed)?;
        let ca = authority.self_signed(&ca_key).map_err(failed)?.pem();
        let issuer = Issuer::new(authority, ca_key);
        let key = KeyPair::generate().map_err(failed)?;
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
            ca,
            certificate,
            key: key.serialize_pem(),
            until,
            names: names.clone(),
        })
    }

    /// New ones for `names` and those served until now; the authorities before stay trusted.
    pub fn renew(&self, names: &BTreeSet<String>, now: Timestamp) -> Result<Self, Error> {
        let mut new = Self::make(&self.names.union(names).cloned().collect(), now)?;
        let before = self.ca.split_inclusive(END).filter(|part| part.ends_with(END));
        for one in before.take(AUTHORITIES - 1) {
            new.ca = format!("{}\n{}\n", new.ca.trim(), one.trim());
        }
        Ok(new)
    }

    /// The data of the Secret that keeps this.
    pub fn to_data(&self) -> BTreeMap<String, ByteString> {
        let pairs = [
            ("ca.crt", self.ca.clone()),
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
            certificate: text("tls.crt")?,
            key: text("tls.key")?,
            until: text("tls.until")?.parse().ok()?,
            names: text("tls.names")?.split(',').map(str::to_owned).collect(),
        };
        let readable = KeyPair::from_pem(&bundle.key).is_ok();
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

    /// Authorities that callers trust.
    fn trusted(bundle: &Bundle) -> usize {
        bundle.ca.matches("BEGIN CERTIFICATE").count()
    }

    #[test]
    fn a_secret_keeps_all_but_the_key_of_the_authority() {
        let bundle = Bundle::make(&names(&["localhost", "10.0.0.1"]), now()).unwrap();
        let data = bundle.to_data();
        assert_eq!(Bundle::from_data(&data), Some(bundle.clone()));
        let text = |bytes: &ByteString| String::from_utf8(bytes.0.clone()).unwrap();
        let keys = data.values().filter(|value| text(value).contains("PRIVATE KEY"));
        assert_eq!(keys.count(), 1, "that of the serving certificate");
        let mut broken = data;
        broken.insert("tls.key".into(), ByteString(b"x".to_vec()));
        assert_eq!(Bundle::from_data(&broken), None);
        broken.remove("tls.key");
        assert_eq!(Bundle::from_data(&broken), None);
    }

    #[test]
    fn new_ones_are_due_in_time_and_for_new_names() {
        let bundle = Bundle::make(&names(&["a"]), now()).unwrap();
        assert!(bundle.serves(&names(&["a"]), now()));
        assert!(!bundle.serves(&names(&["a", "b"]), now()));
        assert!(bundle.serves(&names(&["a"]), days_after(now(), 240)));
        assert!(!bundle.serves(&names(&["a"]), days_after(now(), 300)));
        let both = bundle.renew(&names(&["b"]), now()).unwrap();
        assert!(both.serves(&names(&["a", "b"]), now()));
    }

    #[test]
    fn old_authorities_stay_trusted_beside_the_new() {
        let old = Bundle::make(&names(&["a"]), now()).unwrap();
        let mut last = old.clone();
        for _ in 1..AUTHORITIES {
            last = last.renew(&names(&["b"]), now()).unwrap();
            assert!(last.ca.contains(old.ca.trim()));
        }
        assert_eq!(trusted(&last), AUTHORITIES);
        let newer = last.renew(&names(&["a"]), now()).unwrap();
        assert_eq!(trusted(&newer), AUTHORITIES);
        assert!(!newer.ca.contains(old.ca.trim()));
        assert!(newer.ca.contains(last.ca.lines().nth(1).unwrap()));
    }
}
