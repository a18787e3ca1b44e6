//! Two image registries with one storage: an open one, and one that requires a password.

use std::fs;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use anyhow::Result;

use super::component::Component;
use crate::parts::Cache;
use crate::parts::Image;
use crate::process::run_command;
use crate::sandbox::{Network, Sandbox};

/// User of the private registry.
pub const REGISTRY_USER: &str = "puller";
/// Password of the private registry. It protects nothing: the registry is removed with the test.
pub const REGISTRY_PASSWORD: &str = "open-sesame";
/// `REGISTRY_PASSWORD` as bcrypt, the only form that the registry accepts.
const HTPASSWD: &str = "$2b$04$eh94zB8sSxrpYFCW3Y9p7eet39lXg81RVNMQP5IcUIrTjuts.weKm";

/// Port of the open registry inside the sandbox.
const OPEN: u16 = 5000;
/// Port of the private registry inside the sandbox.
const PRIVATE: u16 = 5001;

/// The registries of a test cluster.
pub struct Registry {
    /// The open one: any image name resolves to it, under the name's path.
    pub open: Component,
    /// The private one: images named `127.0.0.1:5001/PATH`.
    pub private: Component,
    pusher: ImagePusher,
    hosts_dir: PathBuf,
}

/// Pushes images; clones push to the same registries.
#[derive(Clone, Debug)]
pub struct ImagePusher {
    address: String,
    work_dir: PathBuf,
}

impl Registry {
    pub(super) fn start(cache: &Cache, sandbox: &Arc<Sandbox>, net: &Network) -> Result<Self> {
        let dir = sandbox.dir();
        let store = dir.join("registry");
        let copy = run_command(
            Command::new("cp")
                .arg("-a")
                .arg(cache.registry_seed())
                .arg(&store),
        );
        copy?;
        let mut open = component(sandbox, "registry", &store, &net.sandbox_address(), OPEN, None)?;
        let password = dir.join("htpasswd");
        fs::write(&password, format!("{REGISTRY_USER}:{HTPASSWD}\n"))?;
        let mut private = component(
            sandbox,
            "registry-private",
            &store,
            &net.sandbox_address(),
            PRIVATE,
            Some(&password),
        )?;
        open.start()?;
        private.start()?;
        write_hosts(sandbox, "127.0.0.1")?;
        let address = format!("{}:{OPEN}", net.sandbox_address());
        Ok(Self {
            open,
            private,
            pusher: ImagePusher {
                address,
                work_dir: dir.join("pushed"),
            },
            hosts_dir: hosts_dir(sandbox),
        })
    }

    /// `HOST:PORT` of the open registry, as the host reaches it.
    pub fn address(&self) -> &str {
        &self.pusher.address
    }

    /// The pusher of these registries.
    pub fn pusher(&self) -> &ImagePusher {
        &self.pusher
    }

    /// `HOST:PORT` prefix of private image names, as the node reaches it.
    pub fn private_host(&self) -> String {
        private_host()
    }

    /// Makes the runtime pull images of the registry `name` (`HOST[:PORT]` of an image name) from `url`, from now on.
    pub fn add_registry_host(&self, name: &str, url: &str) -> Result<()> {
        add_registry_host(&self.hosts_dir, name, url)
    }

    /// Builds an image and pushes it as `PATH:TAG`; both registries then have it.
    pub fn push(&self, name: &str, image: &Image) -> Result<()> {
        self.pusher.push(name, image)
    }

    /// Adds a second name to the image `PATH:TAG`, so that both names have one digest.
    pub fn tag(&self, name: &str, other: &str) -> Result<()> {
        self.pusher.tag(name, other)
    }

    /// Content of a Docker configuration file with the private registry's password.
    pub fn docker_config(&self) -> String {
        let login = serde_json::json!({ "username": REGISTRY_USER, "password": REGISTRY_PASSWORD });
        serde_json::json!({ "auths": { self.private_host(): login } }).to_string()
    }
}

/// Where the runtime of a sandbox looks for the hosts of registries.
pub(super) fn hosts_dir(sandbox: &Sandbox) -> PathBuf {
    sandbox.dir().join("registries.d")
}

/// Makes the runtime of a sandbox pull from the registries that listen at `address`.
pub(super) fn write_hosts(sandbox: &Sandbox, address: &str) -> Result<()> {
    let dir = hosts_dir(sandbox);
    add_registry_host(&dir, "_default", &format!("http://{address}:{OPEN}"))?;
    add_registry_host(&dir, &private_host(), &format!("http://{address}:{PRIVATE}"))
}

fn private_host() -> String {
    format!("127.0.0.1:{PRIVATE}")
}

fn add_registry_host(hosts_dir: &Path, name: &str, url: &str) -> Result<()> {
    let dir = hosts_dir.join(name);
    fs::create_dir_all(&dir)?;
    let text = format!("server = \"{url}\"\n[host.\"{url}\"]\ncapabilities = [\"pull\", \"resolve\"]\n");
    Ok(fs::write(dir.join("hosts.toml"), text)?)
}

impl ImagePusher {
    /// Builds an image and pushes it as `PATH:TAG`; both registries then have it.
    pub fn push(&self, name: &str, image: &Image) -> Result<()> {
        let layout = self.work_dir.join(name.replace(['/', ':'], "-"));
        image.build(&layout)?;
        let outcome = push_layout(&layout, &self.address, name);
        fs::remove_dir_all(&layout).ok();
        outcome
    }

    /// Adds a second name to the image `PATH:TAG`, so that both names have one digest.
    pub fn tag(&self, name: &str, other: &str) -> Result<()> {
        let mut command = Command::new("skopeo");
        command.args(["copy", "--quiet", "--insecure-policy"]);
        command.args(["--src-tls-verify=false", "--dest-tls-verify=false"]);
        command
            .arg(format!("docker://{}/{name}", self.address))
            .arg(format!("docker://{}/{other}", self.address));
        run_command(&mut command).map(drop)
    }
}

pub(crate) fn push_layout(layout: &Path, address: &str, name: &str) -> Result<()> {
    let mut command = Command::new("skopeo");
    command.args(["copy", "--quiet", "--insecure-policy", "--dest-tls-verify=false"]);
    command
        .arg(format!("oci:{}:it", layout.display()))
        .arg(format!("docker://{address}/{name}"));
    run_command(&mut command).map(drop)
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
