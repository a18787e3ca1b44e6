//! The webhook certificates: their content, renewal time and creation.
//!
//! A CA of our own signs one serving certificate. Its key is not kept, so that no one can sign another one. Both
//! certificates are in one Secret that all replicas share. A new CA is published together with the previous ones,
//! because other replicas still serve certificates that those signed.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Cursor;

use jiff::{Span, Timestamp, tz::TimeZone};
use k8s_openapi::ByteString;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use rustls::crypto::ring::sign::any_supported_type;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;

use super::Error;

const VALIDITY_DAYS: i64 = 365;
/// Renewed when the remaining validity is shorter.
const RENEW_BEFORE_DAYS: i64 = 120;
/// A renewed certificate is served when the previous one is valid for less. Between the two, API servers get the new CA,
/// also if no manager publishes it for weeks.
const SERVE_RENEWED_BEFORE_DAYS: i64 = 30;
/// CAs in the bundle: replicas that start with different DNS names one after the other create one each.
const MAX_TRUSTED_CAS: usize = 4;
const PEM_END: &str = "-----END CERTIFICATE-----";

/// The CA certificates, the serving certificate and its key, all in PEM. `Debug` does not print the key.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Bundle {
    /// What clients trust: the current CA, then the previous ones.
    pub ca: String,
    pub certificate: String,
    /// Key of the serving certificate.
    pub key: String,
    expires: Timestamp,
    names: BTreeSet<String>,
}

impl std::fmt::Debug for Bundle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bundle")
            .field("until", &self.expires)
            .field("names", &self.names)
            .finish_non_exhaustive()
    }
}

impl Bundle {
    pub fn expires(&self) -> Timestamp {
        self.expires
    }

    /// The DNS names of the serving certificate.
    pub fn names(&self) -> String {
        let names: Vec<&str> = self.names.iter().map(String::as_str).collect();
        names.join(",")
    }

    /// The CA that signed the serving certificate.
    pub fn current_ca(&self) -> &str {
        self.ca.split_inclusive(PEM_END).next().unwrap_or_default().trim()
    }

    /// The CAs that clients trust, the current one first.
    fn trusted_cas(&self) -> impl Iterator<Item = &str> {
        let parts = self.ca.split_inclusive(PEM_END).map(str::trim);
        parts.filter(|part| part.ends_with(PEM_END))
    }

    /// Whether the certificate covers `names` at `now` and needs no renewal yet.
    pub fn is_valid_for(&self, names: &BTreeSet<String>, now: Timestamp) -> bool {
        self.is_valid_for_days(RENEW_BEFORE_DAYS, names, now)
    }

    /// One that was made by a clock far ahead is not valid yet.
    fn is_valid_for_days(&self, days: i64, names: &BTreeSet<String>, now: Timestamp) -> bool {
        let lifetime = days_after(now, days)..=days_after(now, VALIDITY_DAYS + 1);
        lifetime.contains(&self.expires) && names.is_subset(&self.names)
    }

    /// Whether this certificate serves as well as that of `renewed`, whose next renewal will still have its CA.
    pub fn can_replace(&self, renewed: &Self, now: Timestamp) -> bool {
        let mut kept = renewed.trusted_cas().take(MAX_TRUSTED_CAS - 1);
        kept.any(|ca| ca == self.current_ca())
            && self.is_valid_for_days(SERVE_RENEWED_BEFORE_DAYS, &renewed.names, now)
    }

    pub fn generate(names: &BTreeSet<String>, now: Timestamp) -> Result<Self, Error> {
        let expires = days_after(now, VALIDITY_DAYS);
        let authority = ca_params(now, expires)?;
        let ca_key = KeyPair::generate().map_err(certificate_error)?;
        let ca = authority.self_signed(&ca_key).map_err(certificate_error)?.pem();
        let issuer = Issuer::new(authority, ca_key);
        let key = KeyPair::generate().map_err(certificate_error)?;
        let mut params =
            CertificateParams::new(names.iter().cloned().collect::<Vec<_>>()).map_err(certificate_error)?;
        params
            .distinguished_name
            .push(DnType::CommonName, "kruise-manager");
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.use_authority_key_identifier_extension = true;
        set_validity(&mut params, now, expires);
        let certificate = params.signed_by(&key, &issuer).map_err(certificate_error)?.pem();
        Ok(Self {
            ca,
            certificate,
            key: key.serialize_pem(),
            expires,
            names: names.clone(),
        })
    }

    /// New certificates for `names` and the previous names; the previous CAs stay trusted.
    pub fn renew(&self, names: &BTreeSet<String>, now: Timestamp) -> Result<Self, Error> {
        let mut new = Self::generate(&self.names.union(names).cloned().collect(), now)?;
        for ca in self.trusted_cas().take(MAX_TRUSTED_CAS - 1) {
            new.ca = format!("{}\n{ca}\n", new.ca.trim());
        }
        Ok(new)
    }

    /// The data of the Secret.
    pub fn to_data(&self) -> BTreeMap<String, ByteString> {
        let pairs = [
            ("ca.crt", self.ca.clone()),
            ("tls.crt", self.certificate.clone()),
            ("tls.key", self.key.clone()),
            ("tls.until", self.expires.to_string()),
            ("tls.names", self.names()),
        ];
        pairs
            .into_iter()
            .map(|(key, text)| (key.to_owned(), ByteString(text.into_bytes())))
            .collect()
    }

    /// Reads the data of the Secret; `None` when something is missing or cannot be read, so that it is created again.
    pub fn parse_data(data: &BTreeMap<String, ByteString>) -> Option<Self> {
        let text = |key: &str| String::from_utf8(data.get(key)?.0.clone()).ok();
        let bundle = Self {
            ca: text("ca.crt")?,
            certificate: text("tls.crt")?,
            key: text("tls.key")?,
            expires: text("tls.until")?.parse().ok()?,
            names: text("tls.names")?.split(',').map(str::to_owned).collect(),
        };
        certified_key(&bundle)?;
        Some(bundle)
    }
}

/// The certificate and its key; `None` if one cannot be read, or they do not belong together.
pub(super) fn certified_key(bundle: &Bundle) -> Option<CertifiedKey> {
    let chain: Result<Vec<_>, _> =
        CertificateDer::pem_reader_iter(Cursor::new(&bundle.certificate)).collect();
    let key = PrivateKeyDer::from_pem_slice(bundle.key.as_bytes()).ok()?;
    let key = CertifiedKey::new(chain.ok()?, any_supported_type(&key).ok()?);
    key.keys_match().ok()?;
    Some(key)
}

fn ca_params(now: Timestamp, expires: Timestamp) -> Result<CertificateParams, Error> {
    let mut params = CertificateParams::new(Vec::new()).map_err(certificate_error)?;
    params
        .distinguished_name
        .push(DnType::CommonName, "kruise-manager webhook authority");
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
    set_validity(&mut params, now, expires);
    Ok(params)
}

fn certificate_error(why: rcgen::Error) -> Error {
    Error::Certificate(why.to_string())
}

fn days_after(time: Timestamp, days: i64) -> Timestamp {
    time.saturating_add(Span::new().hours(24 * days)).unwrap_or(time)
}

/// Year, month and day, the format of `rcgen`.
fn date_parts(time: Timestamp) -> (i32, u8, u8) {
    let day = time.to_zoned(TimeZone::UTC).date();
    let small = |number: i8| u8::try_from(number).unwrap_or(1);
    (i32::from(day.year()), small(day.month()), small(day.day()))
}

/// Sets the validity; it begins a day early, for clocks that are behind.
fn set_validity(params: &mut CertificateParams, now: Timestamp, expires: Timestamp) {
    let (year, month, date) = date_parts(days_after(now, -1));
    params.not_before = rcgen::date_time_ymd(year, month, date);
    let (year, month, date) = date_parts(expires);
    params.not_after = rcgen::date_time_ymd(year, month, date);
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn names(list: &[&str]) -> BTreeSet<String> {
        list.iter().map(|name| (*name).to_owned()).collect()
    }

    fn now() -> Timestamp {
        "2026-03-01T12:00:00Z".parse().unwrap()
    }

    /// Number of trusted CAs.
    fn trusted_cas(bundle: &Bundle) -> usize {
        bundle.ca.matches("BEGIN CERTIFICATE").count()
    }

    #[test]
    fn secret_round_trip_omits_the_ca_key() {
        let bundle = Bundle::generate(&names(&["localhost", "10.0.0.1"]), now()).unwrap();
        let data = bundle.to_data();
        assert_eq!(Bundle::parse_data(&data), Some(bundle.clone()));
        let text = |bytes: &ByteString| String::from_utf8(bytes.0.clone()).unwrap();
        let keys = data.values().filter(|value| text(value).contains("PRIVATE KEY"));
        assert_eq!(keys.count(), 1, "only the key of the serving certificate");
        let mut broken = data;
        broken.insert("tls.key".into(), ByteString(b"x".to_vec()));
        assert_eq!(Bundle::parse_data(&broken), None);
        broken.remove("tls.key");
        assert_eq!(Bundle::parse_data(&broken), None);
        let other = Bundle::generate(&names(&["localhost"]), now()).unwrap();
        broken.insert("tls.key".into(), ByteString(other.key.into_bytes()));
        assert_eq!(
            Bundle::parse_data(&broken),
            None,
            "the key of another certificate"
        );
    }

    #[test]
    fn renewal_is_due_by_age_and_new_names() {
        let bundle = Bundle::generate(&names(&["a"]), now()).unwrap();
        assert!(bundle.is_valid_for(&names(&["a"]), now()));
        assert!(!bundle.is_valid_for(&names(&["a", "b"]), now()));
        assert!(bundle.is_valid_for(&names(&["a"]), days_after(now(), 240)));
        assert!(!bundle.is_valid_for(&names(&["a"]), days_after(now(), 300)));
        let too_early = days_after(now(), -3);
        assert!(
            !bundle.is_valid_for(&names(&["a"]), too_early),
            "the clock was ahead"
        );
        let both = bundle.renew(&names(&["b"]), now()).unwrap();
        assert!(both.is_valid_for(&names(&["a", "b"]), now()));
    }

    #[test]
    fn previous_certificate_is_served_while_it_is_as_good() {
        let old = Bundle::generate(&names(&["a"]), now()).unwrap();
        let renewed = old.renew(&names(&["a"]), days_after(now(), 245)).unwrap();
        assert!(old.can_replace(&renewed, days_after(now(), 334)));
        assert!(!old.can_replace(&renewed, days_after(now(), 336)), "soon expired");
        assert!(!old.can_replace(&renewed, days_after(now(), -3)), "not valid yet");
        let renamed = old.renew(&names(&["b"]), now()).unwrap();
        assert!(!old.can_replace(&renamed, now()), "has not the new name");
        let other = Bundle::generate(&names(&["a"]), now()).unwrap();
        assert!(!old.can_replace(&other, now()), "not trusted");
        let again = renewed.renew(&names(&["a"]), now()).unwrap();
        assert!(old.can_replace(&again, now()));
        let last = again.renew(&names(&["a"]), now()).unwrap();
        assert!(last.ca.contains(old.current_ca()));
        assert!(
            !old.can_replace(&last, now()),
            "not trusted after the next renewal"
        );
    }

    #[test]
    fn old_cas_stay_trusted_after_renewal() {
        let old = Bundle::generate(&names(&["a"]), now()).unwrap();
        let mut last = old.clone();
        for _ in 1..MAX_TRUSTED_CAS {
            last = last.renew(&names(&["b"]), now()).unwrap();
            assert!(last.ca.contains(old.ca.trim()));
        }
        assert_eq!(trusted_cas(&last), MAX_TRUSTED_CAS);
        let newer = last.renew(&names(&["a"]), now()).unwrap();
        assert_eq!(trusted_cas(&newer), MAX_TRUSTED_CAS);
        assert!(!newer.ca.contains(old.ca.trim()));
        assert!(newer.ca.contains(last.ca.lines().nth(1).unwrap()));
    }
}
