//! Keys and certificates of a bed, made by openssl.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::process::run;

/// A folder with a certificate authority, and what it signed.
#[derive(Clone, Debug)]
pub struct Certs {
    dir: PathBuf,
}

/// A certificate and its key.
#[derive(Clone, Debug)]
pub struct Pair {
    /// PEM file of the certificate.
    pub cert: PathBuf,
    /// PEM file of the key.
    pub key: PathBuf,
}

impl Certs {
    /// Makes the authority and the key that signs service account tokens.
    pub fn new(dir: &Path) -> Result<Self> {
        fs::create_dir_all(dir)?;
        let certs = Self { dir: dir.to_owned() };
        certs.request("ca", &["-x509", "-days", "2", "-subj", "/CN=kruise-bed"])?;
        let key = certs.service_account_key();
        run(
            "openssl",
            &[
                "genpkey",
                "-algorithm",
                "RSA",
                "-pkeyopt",
                "rsa_keygen_bits:2048",
                "-out",
                &text(&key),
            ],
        )?;
        Ok(certs)
    }

    /// PEM file of the authority's certificate.
    pub fn ca(&self) -> PathBuf {
        self.dir.join("ca.crt")
    }

    /// PEM file of the authority's key.
    pub fn ca_key(&self) -> PathBuf {
        self.dir.join("ca.key")
    }

    /// PEM file of the key that signs service account tokens.
    pub fn service_account_key(&self) -> PathBuf {
        self.dir.join("sa.key")
    }

    /// A certificate for a client: user and groups.
    pub fn client(&self, name: &str, user: &str, groups: &[&str]) -> Result<Pair> {
        let groups: String = groups.iter().map(|g| format!("/O={g}")).collect();
        self.signed(
            name,
            &format!("{groups}/CN={user}"),
            &["-addext", "extendedKeyUsage=clientAuth"],
        )
    }

    /// A certificate for a server that is reached at `names`, each as `DNS:…` or `IP:…`.
    pub fn server(&self, name: &str, names: &[String]) -> Result<Pair> {
        let alternatives = format!("subjectAltName={}", names.join(","));
        self.signed(
            name,
            &format!("/CN={name}"),
            &["-addext", "extendedKeyUsage=serverAuth", "-addext", &alternatives],
        )
    }

    fn signed(&self, name: &str, subject: &str, more: &[&str]) -> Result<Pair> {
        let (ca, key) = (text(&self.ca()), text(&self.ca_key()));
        let mut args = vec![
            "-x509", "-days", "2", "-CA", &ca, "-CAkey", &key, "-subj", subject,
        ];
        args.extend(["-addext", "basicConstraints=critical,CA:FALSE"]);
        args.extend(more);
        self.request(name, &args)?;
        Ok(Pair {
            cert: self.dir.join(format!("{name}.crt")),
            key: self.dir.join(format!("{name}.key")),
        })
    }

    fn request(&self, name: &str, more: &[&str]) -> Result<()> {
        let cert = text(&self.dir.join(format!("{name}.crt")));
        let key = text(&self.dir.join(format!("{name}.key")));
        let mut args = vec![
            "req",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
        ];
        args.extend(["-keyout", &key, "-out", &cert]);
        args.extend(more);
        run("openssl", &args).map(drop)
    }
}

fn text(path: &Path) -> String {
    path.display().to_string()
}
