//! Credential helpers of a Docker configuration: programs `docker-credential-NAME` that know a registry's credentials.
//!
//! In:  `credsStore` and `credHelpers` of the file, the registries of the images, the helpers' output.
//! Out: credentials, tried after those in the file.

use std::collections::{BTreeMap, BTreeSet};

use futures::future::join_all;
use serde::Deserialize;
use tokio::process::Command;

use super::plan::ImageToPull;
use crate::image_pull::node_credentials::exec;
use crate::image_pull::plan::keyring::{Credentials, Keyring};
use kruise_api::image_reference::ImageReference;

/// Docker's name of its own registry, in its configuration and to helpers.
const DOCKER_HUB: &str = "https://index.docker.io/v1/";
/// A user name by which a helper says that the secret is an identity token.
const TOKEN_USER: &str = "<token>";

/// The helpers of a Docker configuration.
#[derive(Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct CredentialHelpers {
    /// The helper of all other registries.
    creds_store: Option<String>,
    /// Helpers by registry.
    cred_helpers: Option<BTreeMap<String, String>>,
}

/// What a helper prints.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct HelperOutput {
    username: String,
    secret: String,
}

impl CredentialHelpers {
    /// Reads a configuration whose `auths` were read before.
    pub fn parse(json: &[u8]) -> Result<Self, serde_json::Error> {
        serde_json::from_slice(json)
    }

    /// The helper for a registry, and the registry's name for it.
    fn helper<'a>(&'a self, host: &'a str) -> Option<(&'a str, &'a str)> {
        let names = match host {
            "docker.io" => [DOCKER_HUB, "docker.io"],
            host => [host, host],
        };
        let helpers = self.cred_helpers.as_ref();
        let own = names
            .iter()
            .find_map(|name| Some((helpers?.get(*name)?.as_str(), *name)));
        let store = self.creds_store.as_deref().map(|store| (store, names[0]));
        own.or(store).filter(|(helper, _)| !helper.is_empty())
    }

    /// Adds what the helpers know about the registries of the images; returns what went wrong, for the user. Without
    /// credentials an image is pulled anonymously.
    pub async fn add_credentials(&self, images: &[ImageToPull], keyring: &mut Keyring) -> Vec<String> {
        let references = images.iter().filter_map(|image| image.spec.image.as_deref().ok());
        let repositories =
            references.filter_map(|image| Some(ImageReference::parse(image).ok()?.repository()));
        let hosts: BTreeSet<String> = repositories
            .filter_map(|repository| Some(repository.split('/').next()?.to_owned()))
            .collect();
        let calls = hosts.iter().filter_map(|host| self.helper(host));
        let results =
            join_all(calls.map(async |(helper, registry)| (registry, call(helper, registry).await)));
        let mut problems = Vec::new();
        for (registry, result) in results.await {
            match result {
                Ok(credentials) => keyring.add(registry, credentials),
                Err(why) => problems.push(format!("{why}; {registry} is used without its credentials")),
            }
        }
        problems
    }
}

/// Calls a helper.
async fn call(helper: &str, registry: &str) -> Result<Credentials, String> {
    let program = format!("docker-credential-{helper}");
    let is_name = helper
        .bytes()
        .all(|byte| byte.is_ascii_alphanumeric() || b".-_".contains(&byte));
    if !is_name {
        return Err(format!("{program:?} is no name of a credential helper"));
    }
    let mut command = Command::new(&program);
    command.arg("get");
    let output = exec::run(command, &program, registry, None).await;
    let output = output.map_err(|why| format!("credential helper {program}: {why}"))?;
    // serde's error may quote a secret.
    let output: HelperOutput = serde_json::from_slice(&output).map_err(|_| {
        format!("credential helper {program}: its output is not JSON with Username and Secret")
    })?;
    Ok(match output.username.as_str() {
        TOKEN_USER => Credentials {
            identity_token: output.secret,
            ..Credentials::default()
        },
        _ => Credentials {
            username: output.username,
            password: output.secret,
            ..Credentials::default()
        },
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn registry_has_its_own_helper_or_the_store() {
        let helpers = |json: &str| CredentialHelpers::parse(json.as_bytes()).unwrap();
        let both = helpers(
            r#"{"credsStore": "all", "credHelpers": {"a.test:5000": "one", "b.test": ""}, "auths": {}}"#,
        );
        assert_eq!(both.helper("a.test:5000"), Some(("one", "a.test:5000")));
        assert_eq!(both.helper("c.test"), Some(("all", "c.test")));
        assert_eq!(both.helper("docker.io"), Some(("all", DOCKER_HUB)));
        // As in Docker, an empty one means none.
        assert_eq!(both.helper("b.test"), None);
        let hub = helpers(r#"{"credHelpers": {"https://index.docker.io/v1/": "hub"}}"#);
        assert_eq!(hub.helper("docker.io"), Some(("hub", DOCKER_HUB)));
        assert_eq!(hub.helper("a.test"), None);
        assert_eq!(
            helpers(r#"{"credsStore": null, "credHelpers": null}"#).helper("a.test"),
            None
        );
        assert!(CredentialHelpers::parse(br#"{"credsStore": 7}"#).is_err());
    }
}
