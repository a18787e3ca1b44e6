//! Kubelet's configuration of credential provider plugins: which plugin is asked for which images.

use std::time::Duration;

use serde::Deserialize;

use crate::image_pull::plan::keyring::Pattern;
use crate::yaml;
use kruise_ops::flag_values::duration;

/// Maximum bytes of the file.
pub const MAX_CONFIG_BYTES: u64 = 1 << 20;
/// Maximum number of plugins.
const MAX_PROVIDERS: usize = 100;
const CONFIG_GROUP: &str = "kubelet.config.k8s.io";
const CONFIG_KIND: &str = "CredentialProviderConfig";
const PLUGIN_GROUP: &str = "credentialprovider.kubelet.k8s.io";
/// Versions of both formats; they differ in nothing that is read here.
const VERSIONS: [&str; 3] = ["v1", "v1beta1", "v1alpha1"];

/// One plugin.
#[derive(Clone, Debug, PartialEq)]
pub struct Provider {
    /// Its name, and the name of its executable.
    pub name: String,
    /// `apiVersion` of requests and responses.
    pub api_version: String,
    /// How long credentials are kept if the plugin does not say it.
    pub default_cache: Duration,
    /// Arguments of the executable.
    pub args: Vec<String>,
    /// Variables of its environment, in addition to those of the daemon.
    pub env: Vec<(String, String)>,
    /// Whether it needs the token of a Pod's service account, which a pull ahead does not have.
    pub requires_service_account: bool,
    images: Vec<Pattern>,
}

impl Provider {
    /// Whether the plugin is asked for images of this repository (`HOST/PATH`).
    pub fn serves(&self, repository: &str) -> bool {
        self.images.iter().any(|pattern| pattern.matches(repository))
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct ConfigFile {
    api_version: String,
    kind: String,
    #[serde(default)]
    providers: Vec<ProviderEntry>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct ProviderEntry {
    name: String,
    match_images: Vec<String>,
    default_cache_duration: String,
    api_version: String,
    #[serde(default)]
    args: Option<Vec<String>>,
    #[serde(default)]
    env: Option<Vec<EnvEntry>>,
    #[serde(default)]
    token_attributes: Option<TokenAttributes>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct EnvEntry {
    name: String,
    #[serde(default)]
    value: String,
}

/// The fields that only concern the token are accepted, and not used.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct TokenAttributes {
    #[serde(default)]
    require_service_account: Option<bool>,
}

/// Parses the file.
///
/// # Errors
/// When kubelet would refuse it: unknown versions and fields, names that are paths, patterns that match no image.
pub fn parse(text: &str) -> Result<Vec<Provider>, String> {
    // The text of an error may have values of the file, and tenants read it: they see only the place.
    let mut documents = yaml::documents(text).map_err(|why| format!("it is not YAML{}", why.place()))?;
    let (Some(document), true) = (documents.pop(), documents.is_empty()) else {
        return Err(format!("it is not one {CONFIG_KIND}"));
    };
    let file: ConfigFile = serde_path_to_error::deserialize(document).map_err(|why| {
        let path = why.path();
        format!("it is not a {CONFIG_KIND}: a field at {path} is unknown, missing or of another type")
    })?;
    let is_version = |text: &str, group: &str| {
        let version = text.strip_prefix(group).and_then(|rest| rest.strip_prefix('/'));
        version.is_some_and(|version| VERSIONS.contains(&version))
    };
    if !is_version(&file.api_version, CONFIG_GROUP) || file.kind != CONFIG_KIND {
        return Err(format!(
            "it is {} {}; expected {CONFIG_GROUP}/v1 {CONFIG_KIND}",
            file.api_version, file.kind
        ));
    }
    if file.providers.is_empty() || file.providers.len() > MAX_PROVIDERS {
        let count = file.providers.len();
        return Err(format!("it has {count} providers; expected 1 to {MAX_PROVIDERS}"));
    }
    let mut providers: Vec<Provider> = Vec::new();
    for entry in file.providers {
        let name = entry.name.clone();
        let provider =
            parse_provider(entry, &is_version).map_err(|why| format!("provider {name:?}: {why}"))?;
        if providers.iter().any(|other| other.name == provider.name) {
            return Err(format!("provider {name:?}: there are two of that name"));
        }
        providers.push(provider);
    }
    Ok(providers)
}

fn parse_provider(
    entry: ProviderEntry,
    is_version: &impl Fn(&str, &str) -> bool,
) -> Result<Provider, String> {
    let is_path = entry.name.contains(['/', '\\']) || [".", "..", ""].contains(&entry.name.as_str());
    if is_path || entry.name.contains(char::is_whitespace) || entry.name.contains('\0') {
        return Err("a name is that of an executable, without a path or spaces".to_owned());
    }
    if !is_version(&entry.api_version, PLUGIN_GROUP) {
        let version = &entry.api_version;
        return Err(format!("apiVersion is {version:?}; expected {PLUGIN_GROUP}/v1"));
    }
    if entry.match_images.is_empty() {
        return Err("matchImages is empty".to_owned());
    }
    let pattern = |text: &String| {
        Pattern::parse(text).ok_or_else(|| format!("{text:?} in matchImages can match no image"))
    };
    let images = entry.match_images.iter().map(pattern);
    let default_cache =
        duration(&entry.default_cache_duration).map_err(|why| format!("defaultCacheDuration: {why}"))?;
    let env = entry.env.unwrap_or_default().into_iter();
    let requires = entry
        .token_attributes
        .and_then(|token| token.require_service_account);
    Ok(Provider {
        name: entry.name,
        api_version: entry.api_version,
        default_cache,
        args: entry.args.unwrap_or_default(),
        env: env.map(|variable| (variable.name, variable.value)).collect(),
        requires_service_account: requires.unwrap_or_default(),
        images: images.collect::<Result<_, _>>()?,
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn config(provider: &str) -> String {
        format!(
            "apiVersion: kubelet.config.k8s.io/v1\nkind: CredentialProviderConfig\nproviders:\n- {provider}\n"
        )
    }

    const PROVIDER: &str = "{name: ecr, matchImages: ['*.dkr.ecr.*.amazonaws.com'], defaultCacheDuration: 12h, \
                            apiVersion: credentialprovider.kubelet.k8s.io/v1";

    #[test]
    fn configuration_of_kubelet_is_read() {
        let rest = "args: [get], env: [{name: A, value: b}], tokenAttributes: {serviceAccountTokenAudience: a, \
                    cacheType: Token, requireServiceAccount: true}}";
        let [provider] = <[_; 1]>::try_from(parse(&config(&format!("{PROVIDER}, {rest}"))).unwrap()).unwrap();
        assert_eq!(provider.name, "ecr");
        assert_eq!(provider.default_cache, Duration::from_secs(12 * 3600));
        assert_eq!(provider.args, ["get"]);
        assert_eq!(provider.env, [("A".to_owned(), "b".to_owned())]);
        assert!(provider.requires_service_account);
        assert!(provider.serves("1.dkr.ecr.eu-west-1.amazonaws.com/app"));
        assert!(!provider.serves("dkr.ecr.eu-west-1.amazonaws.com/app"));
    }

    #[test]
    fn what_kubelet_refuses_is_refused() {
        let valid = config(&format!("{PROVIDER}}}"));
        assert!(parse(&valid).is_ok());
        for (from, to, why) in [
            (
                "kubelet.config.k8s.io/v1\n",
                "kubelet.config.k8s.io/v9\n",
                "expected kubelet.config.k8s.io/v1",
            ),
            ("kind: Cred", "kind: Other", "expected kubelet.config.k8s.io/v1"),
            ("name: ecr", "name: ../ecr", "without a path"),
            ("name: ecr", "name: ''", "without a path"),
            ("name: ecr", "name: 'a b'", "without a path"),
            (
                "name: ecr",
                "label: ecr",
                "not a CredentialProviderConfig: a field at providers[0].label is unknown",
            ),
            ("name: ecr", "name: [", "it is not YAML (line"),
            (
                "kind: Cred",
                "---\nkind: Cred",
                "it is not one CredentialProviderConfig",
            ),
            ("kubelet.k8s.io/v1}", "kubelet.k8s.io/v2}", "apiVersion is"),
            ("12h", "-1h", "defaultCacheDuration"),
            ("'*.dkr.ecr.*.amazonaws.com'", "", "matchImages is empty"),
            ("'*.dkr.ecr.*.amazonaws.com'", "'a b'", "can match no image"),
        ] {
            assert!(valid.contains(from), "{from}");
            let text = parse(&valid.replacen(from, to, 1)).unwrap_err();
            assert!(text.contains(why), "{to}: {text}");
        }
        let twice = format!("{valid}- {PROVIDER}}}\n");
        assert!(parse(&twice).unwrap_err().contains("two of that name"));
        assert!(parse("").is_err());
        assert!(parse("[]").is_err());
        let why = parse(&valid.replace("v1}", "v1, env: [{name: A, value: [hidden]}]}")).unwrap_err();
        assert!(
            why.contains("providers[0].env[0].value") && !why.contains("hidden"),
            "{why}"
        );
    }
}
