//! Two image registries over one store: one open, one that asks for a password.

use std::fs;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use anyhow::Result;

use super::component::Component;
use crate::parts::Cache;
use crate::parts::Image;
use crate::process::finish;
use crate::sandbox::{Network, Sandbox};

/// User of the private registry.
pub const REGISTRY_USER: &str = "puller";
/// Password of the private registry. It protects nothing: the registry lives as long as a test.
pub const REGISTRY_PASSWORD: &str = "open-sesame";
/// `REGISTRY_PASSWORD` as bcrypt, the only form that the registry takes.
const HTPASSWD: &str = "$2b$04$eh94zB8sSxrpYFCW3Y9p7eet39lXg81RVNMQP5IcUIrTjuts.weKm";

/// Port of the open registry inside the bed.
const OPEN: u16 = 5000;
/// Port of the private registry inside the bed.
const PRIVATE: u16 = 5001;

/// The registries of a bed.
pub struct Registry {
    /// The open one: any image name resolves to it, under the name's path.
    pub open: Component,
    /// The private one: images named `127.0.0.1:5001/PATH`.
    pub private: Component,
    store: Store,
    hosts: PathBuf,
}

/// Where images are pushed to; clones push to the same registries.
#[derive(Clone, Debug)]
pub struct Store {
    address: String,
    work: PathBuf,
}

impl Registry {
    pub(super) fn start(cache: &Cache, sandbox: &Arc<Sandbox>, net: &Network) -> Result<Self> {
        let dir = sandbox.dir();
        let store = dir.join("registry");
        let copy = finish(
            Command::new("cp")
                .arg("-a")
                .arg(cache.registry_seed())
                .arg(&store),
        );
        copy?;
        let mut open = component(sandbox, "registry", &store, &net.bed(), OPEN, None)?;
        let password = dir.join("htpasswd");
        fs::write(&password, format!("{REGISTRY_USER}:{HTPASSWD}\n"))?;
        let mut private = component(
            sandbox,
            "registry-private",
            &store,
            &net.bed(),
            PRIVATE,
            Some(&password),
        )?;
        open.start()?;
        private.start()?;
        let address = format!("{}:{OPEN}", net.bed());
        let registry = Self {
            open,
            private,
            store: Store {
                address,
                work: dir.join("pushed"),
            },
            hosts: dir.join("registries.d"),
        };
        registry.serve("_default", &format!("http://127.0.0.1:{OPEN}"))?;
        registry.serve(&registry.private_host(), &format!("http://127.0.0.1:{PRIVATE}"))?;
        Ok(registry)
    }

    /// `HOST:PORT` of the open registry, as the host reaches it.
    pub fn address(&self) -> &str {
        &self.store.address
    }

    /// Where images are pushed to.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// `HOST:PORT` that begins the names of private images, as the node reaches it.
    pub fn private_host(&self) -> String {
        format!("127.0.0.1:{PRIVATE}")
    }

    /// Lets the runtime find images of the registry `name` (`HOST[:PORT]` of an image name) at `url`, from now on.
    pub fn serve(&self, name: &str, url: &str) -> Result<()> {
        let dir = self.hosts.join(name);
        fs::create_dir_all(&dir)?;
        let text = format!("server = \"{url}\"\n[host.\"{url}\"]\ncapabilities = [\"pull\", \"resolve\"]\n");
        Ok(fs::write(dir.join("hosts.toml"), text)?)
    }

    /// Builds an image and pushes it as `PATH:TAG`; both registries have it then.
    pub fn push(&self, name: &str, image: &Image) -> Result<()> {
        self.store.push(name, image)
    }

    /// Gives the image `PATH:TAG` a second name, so that both have one digest.
    pub fn tag(&self, name: &str, other: &str) -> Result<()> {
        self.store.tag(name, other)
    }

    /// Content of a Docker configuration file with the private registry's password.
    pub fn docker_config(&self) -> String {
        let login = serde_json::json!({ "username": REGISTRY_USER, "password": REGISTRY_PASSWORD });
        serde_json::json!({ "auths": { self.private_host(): login } }).to_string()
    }
}

impl Store {
    /// Builds an image and pushes it as `PATH:TAG`; both registries have it then.
    pub fn push(&self, name: &str, image: &Image) -> Result<()> {
        let layout = self.work.join(name.replace(['/', ':'], "-"));
        image.build(&layout)?;
        let outcome = push(&layout, &self.address, name);
        fs::remove_dir_all(&layout).ok();
        outcome
    }

    /// Gives the image `PATH:TAG` a second name, so that both have one digest.
    pub fn tag(&self, name: &str, other: &str) -> Result<()> {
        let mut command = Command::new("skopeo");
        command.args(["copy", "--quiet", "--insecure-policy"]);
        command.args(["--src-tls-verify=false", "--dest-tls-verify=false"]);
        command
            .arg(format!("docker://{}/{name}", self.address))
            .arg(format!("docker://{}/{other}", self.address));
        finish(&mut command).map(drop)
    }
}

pub(crate) fn push(layout: &Path, address: &str, name: &str) -> Result<()> {
    let mut command = Command::new("skopeo");
    command.args(["copy", "--quiet", "--insecure-policy", "--dest-tls-verify=false"]);
    command
        .arg(format!("oci:{}:it", layout.display()))
        .arg(format!("docker://{address}/{name}"));
    finish(&mut command).map(drop)
}

pub(crate) fn component(
    sandbox: &Arc<Sandbox>,
    name: &'static str,
    store: &Path,
    host: &str,
    port: u16,
    password: Option<&Path>,
) -> Result<Component> {
    let mut config = serde_json::json!({
        "version": 0.1,
        "log": { "level": "warn", "accesslog": { "disabled": true } },
        "storage": { "filesystem": { "rootdirectory": store }, "delete": { "enabled": true } },
        "http": { "addr": format!("0.0.0.0:{port}") },
    });
    if let Some(path) = password {
        config["auth"] = serde_json::json!({ "htpasswd": { "realm": "bed", "path": path } });
    }
    let file = sandbox.dir().join(format!("{name}.json"));
    fs::write(&file, config.to_string())?;
    let address = format!("{host}:{port}");
    Ok(Component::new(sandbox, name, "docker-registry")
        .args([Path::new("serve"), &file])
        .ready(move || TcpStream::connect(&address).is_ok()))
}
