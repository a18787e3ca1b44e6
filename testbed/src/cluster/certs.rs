//! Keys and certificates of a test cluster, created by openssl.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::process::run;

/// A folder with a certificate authority and the certificates that it signed.
#[derive(Clone, Debug)]
pub struct Certs {
    dir: PathBuf,
}

/// A certificate and its key.
#[derive(Clone, Debug)]
pub struct KeyPair {
    /// PEM file of the certificate.
    pub cert: PathBuf,
    /// PEM file of the key.
    pub key: PathBuf,
}

impl Certs {
    /// Creates the authority and the key that signs service account tokens.
    pub fn new(dir: &Path) -> Result<Self> {
        fs::create_dir_all(dir)?;
        let certs = Self { dir: dir.to_owned() };
        certs.openssl_req("ca", &["-x509", "-days", "2", "-subj", "/CN=kruise-bed"])?;
        // An RSA key takes a third of a second of a core, or more. Not `genpkey`: the API server reads no public key from
        // an elliptic key in PKCS #8.
        let key = path_string(&certs.service_account_key());
        run(
            "openssl",
            &[
                "ecparam",
                "-name",
                "prime256v1",
                "-genkey",
                "-noout",
                "-out",
                &key,
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

    /// Issues a client certificate for a user and groups.
    pub fn client(&self, name: &str, user: &str, groups: &[&str]) -> Result<KeyPair> {
        let groups: String = groups.iter().map(|g| format!("/O={g}")).collect();
        self.issue(
            name,
            &format!("{groups}/CN={user}"),
            &["-addext", "extendedKeyUsage=clientAuth"],
        )
    }

    /// Issues a certificate for a server with these `names`, each as `DNS:…` or `IP:…`.
    pub fn server(&self, name: &str, names: &[String]) -> Result<KeyPair> {
        let alternatives = format!("subjectAltName={}", names.join(","));
        self.issue(
            name,
            &format!("/CN={name}"),
            &["-addext", "extendedKeyUsage=serverAuth", "-addext", &alternatives],
        )
    }

    fn issue(&self, name: &str, subject: &str, extra_args: &[&str]) -> Result<KeyPair> {
        let (ca, key) = (path_string(&self.ca()), path_string(&self.ca_key()));
        let mut args = vec![
            "-x509", "-days", "2", "-CA", &ca, "-CAkey", &key, "-subj", subject,
        ];
        args.extend(["-addext", "basicConstraints=critical,CA:FALSE"]);
        args.extend(extra_args);
        self.openssl_req(name, &args)?;
        Ok(KeyPair {
            cert: self.dir.join(format!("{name}.crt")),
            key: self.dir.join(format!("{name}.key")),
        })
    }

    fn openssl_req(&self, name: &str, extra_args: &[&str]) -> Result<()> {
        let cert = path_string(&self.dir.join(format!("{name}.crt")));
        let key = path_string(&self.dir.join(format!("{name}.key")));
        let mut args = vec![
            "req",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
        ];
        args.extend(["-keyout", &key, "-out", &cert]);
        args.extend(extra_args);
        run("openssl", &args).map(drop)
    }
}

fn path_string(path: &Path) -> String {
    path.display().to_string()
}
