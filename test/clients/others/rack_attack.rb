# rack-attack at the times of LONG, as node.js prints its answers.  Each third request is bad.
require 'active_support'
require 'active_support/cache'
require 'rack'
require 'rack/attack'

$now = 0
Time.define_singleton_method(:now) { Time.at($now) }
Rack::Attack.cache.store = ActiveSupport::Cache::MemoryStore.new
Rack::Attack.throttle('calls', limit: 6, period: 60) { |request| 'k' if request.path == '/throttle' }
many = { maxretry: 3, findtime: 60, bantime: 120 }
Rack::Attack.blocklist('bad') do |request|
  %w[/fail /page].include?(request.path) &&
    Rack::Attack::Fail2Ban.filter(request.path, **many) { request.params['bad'] }
end
Rack::Attack.blocklist('storm') do |request|
  request.path == '/allow' && Rack::Attack::Allow2Ban.filter('a', **many) { true }
end
attack = Rack::Attack.new(->(_) { [200, {}, []] })

%w[throttle fail].each do |name|
  bits = ENV['LONG'].split.each_with_index.map do |ms, n|
    $now = Rational(ms.to_i, 1000)
    status, = attack.call(Rack::MockRequest.env_for("/#{name}#{'?bad=1' if n % 3 == 0}"))
    status == 200 ? 1 : 0
  end
  puts "rack #{name}\t#{bits.join}"
end
page = (1..9).map do |n|
  attack.call(Rack::MockRequest.env_for("/page#{'?bad=1' if [2, 4, 6].include?(n)}")).first == 200 ? 0 : 1
end
puts "rack page\t#{page.join}"
storm = (1..9).map do |second|
  $now += second
  attack.call(Rack::MockRequest.env_for('/allow')).first == 200 ? 1 : 0
end
puts "rack allow\t#{storm.join}"
